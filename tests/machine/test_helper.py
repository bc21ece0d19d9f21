"""Helpers, beyond what tests of their tasks show (`tests/text/test_chat_template.py`, `tests/server`)."""

import errno

import pytest

from remask.machine import helper
from remask.machine.helper import Helpers, LateError, StartError


def test_an_answer_that_never_comes_is_late_and_its_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "_PROGRAM", "import signal; signal.pause()")
    helpers = Helpers("a:task", b"", seconds=1, memory=1 << 30, wait=0.01)
    for _ in range(2):
        with pytest.raises(LateError, match=r"more than 0.01 s on this machine"):
            helpers.ask(b"a question")
        assert helpers.idle == []


def test_a_process_that_the_system_does_not_start_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    helpers = Helpers("a:task", b"", seconds=1, memory=1 << 30, wait=1)
    with monkeypatch.context() as patch:
        patch.setattr("remask.machine.helper.subprocess.Popen", refuse)
        with pytest.raises(StartError, match="its process cannot be started: Resource temporarily unavailable"):
            helpers.ask(b"a question")
