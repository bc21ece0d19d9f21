"""Runs code that a model wrote against the tests of its problem, in processes of their own, with limits.

The code runs in one process and the tests in another (`remask_lab.harness.sandbox`). Assertions therefore hold
whatever the code does to its interpreter, and a pass is the exit status of a process in which it never ran.
"""

import logging
import os
import socket
import subprocess
import tempfile
import time
from functools import cache
from typing import IO, Final

from remask.errors import RemaskError
from remask_lab.harness.sandbox.confinement import Confinement, Limits, choices, start_program
from remask_lab.harness.sandbox.judge import ENDED, PASSED
from remask_lab.harness.sandbox.supervisor import NOT_BUILT, remove
from remask_lab.harness.sandbox.values import one_line

log = logging.getLogger(__name__)

_TEXT_BYTES: Final = 8192
# The code's own process and one that it starts, and a module that nothing has imported: it may need any of the library.
_PROBE: Final = """
import subprocess, sys
def probe():
    import colorsys
    return subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout.strip()
"""


class SandboxError(RemaskError):
    """Generated code could not be confined, or not be ended."""


def run_tests(
    code: str,
    tests: str,
    before: str = "",
    entry: str = "",
    limits: Limits | None = None,
    confinement: Confinement | None = None,
) -> str | None:
    """Run `tests` on what `code` defines. None where all went through, else why not, in one line.

    Args:
        code: what the model wrote. It never meets `tests`.
        tests: statements that raise where the code is wrong.
        before: what the tests may use beside the code.
        entry: the one function that is the code's, even where `before` defines it. Empty: the names that `before` and
            `tests` read and do not define, built-in ones only where there are no others.
        limits: of the run; None: the defaults.
        confinement: how the code is confined; None: `offered()`.

    Arguments and results cross as copies. Tests that hand over a function or an object of their own fail, and so do
    those that ask for the type or the identity of an object that the code made.

    Raises:
        SandboxError: the confinement could not be built, or left a process behind.
    """
    limits = Limits() if limits is None else limits
    confinement = offered() if confinement is None else confinement
    folder = tempfile.mkdtemp(prefix="remask-")
    near, far = socket.socketpair()
    try:
        with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as verdict:
            until = time.monotonic() + limits.seconds
            job = {
                "before": before,
                "tests": tests,
                "entry": entry,
                "link": near.fileno(),
                "seconds": limits.seconds,
                "megabytes": limits.megabytes,
            }
            candidate = confinement.start(code, far.fileno(), folder, limits, report)
            try:
                far.close()
                judge = start_program("judge", job, verdict, near.fileno())
                near.close()
                status = _wait(judge, until)
                # The exit status of the candidate is known a moment after its end of the connection is closed.
                ended = candidate.status(2.0) if status == ENDED else None
            finally:
                candidate.end()
            if candidate.supervisor.returncode < 0:
                log.error("Generated code ended its supervisor: some of its processes may run on")
            failure = _text(report)
            if failure and candidate.supervisor.returncode == NOT_BUILT:
                raise SandboxError(f"Generated code could not be run safely ({confinement.mode}): {failure}")
            return _outcome(status, ended, failure or _text(verdict), limits)
    finally:
        near.close()
        far.close()
        remove(folder)


@cache
def offered() -> Confinement:
    """The strictest confinement that works here. Found by trying; what it leaves open is logged, once."""
    for confinement in choices():
        try:
            failure = run_tests(_PROBE, "assert probe() == b'1'", confinement=confinement)
        except SandboxError as error:
            failure = str(error)
        if failure is None:
            log.warning("%s", confinement.describe())
            return confinement
        log.debug("%s does not work: %s", confinement, failure)
    raise SandboxError("No way to run generated code works on this machine; log at level DEBUG for what was tried")


def _wait(judge: "subprocess.Popen[bytes]", until: float) -> int | None:
    """The judge's exit status; None where the time is over, and then it is ended."""
    try:
        return judge.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if judge.poll() is None:
            judge.kill()
            judge.wait()


def _outcome(status: int | None, ended: int | None, failure: str, limits: Limits) -> str | None:
    if status == PASSED:
        return None
    if status is None and not failure:
        return f"it ran longer than {limits.seconds:g} seconds"
    if failure:
        return failure
    if status == ENDED and ended is not None:
        return f"it ended early, with status {ended}" if ended < 128 else f"it ended early, by signal {ended - 128}"
    return f"its tests ended early, with status {status}"


def _text(file: IO[bytes]) -> str:
    """The start of what a program wrote, as one line."""
    return one_line(os.pread(file.fileno(), _TEXT_BYTES, 0).decode("utf-8", "replace"))
