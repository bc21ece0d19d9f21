"""Runs code that a model wrote, in a separate process with limits.

This is no security boundary. The process has the user's rights on files. Its time, memory and size of files are
limited, and it has no network where the kernel lets an ordinary user make a network namespace. Run evaluations of code
in a container or on a machine that may be lost.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Final

SECONDS: Final = 10.0
MEGABYTES: Final = 1024

# The child runs this. It drops what the program prints. Only the word that it writes after the last test reaches the
# parent, so a program that ends early does not pass.
_CHILD: Final = """
import ctypes, json, os, resource, sys
given = json.load(sys.stdin)
unshare = getattr(ctypes.CDLL(None), "unshare", None)  # Linux alone has it
if unshare is not None:
    unshare(0x10000000 | 0x40000000)  # a user and a network namespace; without the right to one the network stays
size = given["megabytes"] * 2**20
for name, value in (("AS", size), ("CPU", int(given["seconds"]) + 1), ("FSIZE", 2**24), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(null, stream)
def report(text):
    os.write(out, text.encode("utf-8", "replace")[:2000])
space = {"__name__": "solution"}
try:
    for part in (given["code"], given["tests"]):
        exec(compile(part, "<generated>", "exec"), space)
except BaseException as error:
    report(f"{type(error).__name__}: {error}")
    os._exit(1)
report(given["word"])
os._exit(0)
"""


def run_tests(code: str, tests: str, seconds: float = SECONDS, megabytes: int = MEGABYTES) -> str | None:
    """Run `code` and then `tests`. Returns None where all tests pass, else the reason in one line.

    `seconds` limits the whole run. The child gets an empty environment and an empty folder.
    """
    word = secrets.token_hex(16)
    given = json.dumps({"code": code, "tests": tests, "word": word, "seconds": seconds, "megabytes": megabytes})
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(given.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it ran longer than {seconds:g} seconds"
        finally:
            _end(child)
    text = output.decode("utf-8", "replace")
    if text == word:
        return None
    return " ".join(text.split()) or f"it ended early, with status {child.returncode}"


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the child and all processes of its session."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
