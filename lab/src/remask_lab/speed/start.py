"""The time from the start of a server to its first answer."""

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
_WAIT_S, _POLL_S = 300.0, 0.05


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Start `remask serve MODEL`, ask one question, and end it: CPU seconds of the server, and seconds that pass.

    The first start has an empty cache folder, which later ones read. CPU time is that of all threads, from the start of
    the process until its end after the first answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = [_time_start(args, os.environ | {"XDG_CACHE_HOME": folder}) for _ in range(1 + args.turns)]
    return {"machine": host(), "commit": commit(), "first": rows[0], "later": rows[1:]}


def _time_start(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Time one start on a free port. Raises `ConfigError` where the server does not answer in `_WAIT_S` seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    usage_before = getrusage(RUSAGE_CHILDREN)
    start_time = time.perf_counter()
    command = [sys.executable, "-c", _MAIN, "--quiet", "serve", args.model, "--port", str(port)]
    process = subprocess.Popen(command, env=environment)
    try:
        client = ChatClient(f"http://127.0.0.1:{port}/v1")
        while True:
            try:
                client.models()
                break
            except RemaskError as error:  # it does not listen yet
                if process.poll() is not None or time.perf_counter() - start_time > _WAIT_S:
                    raise ConfigError(f"--model={args.model!r}: the server did not start: {error}") from error
                time.sleep(_POLL_S)
        text = "".join(client.stream({"model": args.model, "messages": QUESTION, "max_tokens": 16}))
        seconds = time.perf_counter() - start_time
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    usage = getrusage(RUSAGE_CHILDREN)
    cpu = usage.ru_utime + usage.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    return {"cpu_s": cpu, "seconds": seconds, "answer": text}
