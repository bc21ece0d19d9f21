"""How soon a server answers after its start."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from remask.cli.chat import ChatClient
from remask.errors import ConfigError, RemaskError
from remask_lab.records.machine import commit, host

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_MAIN = "import sys; from remask.cli import main; sys.exit(main(sys.argv[1:]))"
_WAIT_S, _LOOK_S = 300.0, 0.05


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Start `remask serve MODEL`, ask one question, and end it: CPU time of the server and what passes meanwhile.

    The first start has an empty cache folder, and the others what it kept there. CPU time is that of all threads from
    the start of the process until it has ended after its first answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = [_answered(args, os.environ | {"XDG_CACHE_HOME": folder}) for _ in range(1 + args.turns)]
    return {"machine": host(), "commit": commit(), "first": rows[0], "later": rows[1:]}


def _answered(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before, began = getrusage(RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", _MAIN, "--quiet", "serve", args.model, "--port", str(port)]
    process = subprocess.Popen(command, env=environment)
    try:
        client = ChatClient(f"http://127.0.0.1:{port}/v1")
        while True:
            try:
                client.models()
                break
            except RemaskError as error:  # it does not listen yet
                if process.poll() is not None or time.perf_counter() - began > _WAIT_S:
                    raise ConfigError(f"--model={args.model!r}: the server did not start: {error}") from error
                time.sleep(_LOOK_S)
        text = "".join(client.stream({"model": args.model, "messages": QUESTION, "max_tokens": 16}))
        seconds = time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    after = getrusage(RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu, "seconds": seconds, "answer": text}
