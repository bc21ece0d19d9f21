"""Processes that must end in time."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run_child(words: Sequence[str], folder: Path, output: Path, seconds: float) -> int | None:
    """Run a process in `folder`. What it prints goes to the file `output`.

    Returns its status; None where it was ended, with its own children, as it had not ended after `seconds`.
    """
    with output.open("wb") as target:
        child = subprocess.Popen(words, cwd=folder, stdout=target, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return child.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
