"""Processes that work for this one under limits of time and memory, on what clients or checkpoints have written.

Both sides send frames: a byte that says what a frame is, a length of eight bytes, and so many bytes of content. The
first one names the task and its limits; each later one is a question, which the helper answers with a frame. A task is
a function that gets its settings once, and returns the function that answers questions. What takes too long ends the
process, by a signal that nothing in it can catch.

A helper runs `main`, and imports nothing of remask but this file and its task, so that it is small and starts quickly.
"""

import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pkgutil import resolve_name
from typing import TypeAlias

Helper: TypeAlias = subprocess.Popen[bytes]
Answers: TypeAlias = Callable[[bytes], bytes]
"""Answers a question of a task. Raises `RefusedError` or `FailedError`; whatever else it raises is a failure too."""

_HEAD = struct.Struct("<cQ")
_QUESTION, _ANSWER, _REFUSED, _FAILED = b"Q", b"A", b"R", b"F"
_REASON = 500  # characters of the reason that an error carries
_NICE = 5
_PROGRAM = "from remask.machine.helper import main; main()"


class RefusedError(Exception):
    """A task does not do what it was asked for; the text says why."""


class FailedError(Exception):
    """A task fails on what it was asked for; the text says why."""


class HelperError(Exception):
    """A helper gave no answer: the task failed, went beyond a limit, or its process ended. The text says which."""


class LateError(HelperError):
    """A helper took longer than a caller waits."""


class Helpers:
    """Processes of one task, one for each thread that asks at the same time.

    A process is started when it is first needed, kept for the next question, and replaced where it has ended. It ends
    with this object, or with the process that made it.

    Args:
        task: the function of the task, as "module:name".
        settings: what that function gets.
        seconds: processor time of one answer.
        memory: bytes that a process may have.
        background: who waits for a step goes before it.
        wait: seconds by the clock after which an answer is late; None: it is waited for.
    """

    def __init__(
        self,
        task: str,
        settings: bytes,
        *,
        seconds: float,
        memory: int,
        background: bool = False,
        wait: float | None = None,
    ) -> None:
        limits = {"seconds": seconds, "memory": memory, "background": background}
        self._job = marshal.dumps({"task": task, "settings": settings, **limits})
        self._seconds, self._memory, self._wait = seconds, memory, wait
        self.idle: list[Helper] = []
        weakref.finalize(self, _end, self.idle)

    def ask(self, question: bytes) -> bytes:
        """What a process answers. Safe on any thread; the interpreter's lock is not held meanwhile.

        Raises `RefusedError` where the task does, and `HelperError` where there is no answer.
        """
        helper, late = self._take(), threading.Event()
        alarm = None if self._wait is None else threading.Timer(self._wait, _stop, (helper, late))
        try:
            if alarm is not None:
                alarm.start()
            kind, content = _asked(helper, question)
        except BaseException:
            _end([helper])
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
        if kind is None:
            _end([helper])
            if late.is_set():
                raise LateError(f"it takes more than {self._wait:g} s on this machine, which may be busy")
            if sys.platform != "win32" and helper.returncode == -signal.SIGPROF:
                raise HelperError(f"it takes more than {self._seconds:g} s of processor time")
            status, most = helper.returncode, self._memory >> 20
            raise HelperError(f"its process ended with status {status}, maybe for want of memory ({most} MiB)")
        self.idle.append(helper)
        if kind == _ANSWER:
            return content
        reason = content.decode("utf-8", "surrogatepass")
        raise RefusedError(reason) if kind == _REFUSED else HelperError(reason)

    def close(self) -> None:
        """End the processes that answer nothing now."""
        _end(self.idle)

    def _take(self) -> Helper:
        """A process that nobody else speaks to."""
        while self.idle:
            with suppress(IndexError):  # another thread was quicker
                helper = self.idle.pop()
                if helper.poll() is None:
                    return helper
                _end([helper])
        # `-P`: a file where the server was started must not stand for a module. The session of its own keeps an
        # interrupt in the terminal from it.
        command = [sys.executable, "-P", "-c", _PROGRAM]
        helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert helper.stdin is not None
        with suppress(BrokenPipeError):  # as in `_asked`
            helper.stdin.write(_frame(_QUESTION, self._job))
        return helper


def _asked(helper: Helper, question: bytes) -> tuple[bytes | None, bytes]:
    """The kind and the content of the answer of a process; no kind where it ended instead."""
    assert helper.stdin is not None
    assert helper.stdout is not None
    with suppress(BrokenPipeError):  # a process that has ended answers nothing
        helper.stdin.write(_frame(_QUESTION, question))
        helper.stdin.flush()
    head = helper.stdout.read(_HEAD.size)
    if len(head) == _HEAD.size:
        kind, length = _HEAD.unpack(head)
        content = helper.stdout.read(length)
        if len(content) == length:  # less of a process that was ended meanwhile, such as for want of memory
            return kind, content
    return None, b""


def _stop(helper: Helper, late: threading.Event) -> None:
    late.set()
    helper.kill()


def _end(helpers: list[Helper]) -> None:
    """End processes and close what leads to them. The status of one that has ended by itself is kept."""
    while helpers:
        helper = helpers.pop()
        helper.kill()
        for pipe in (helper.stdin, helper.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        helper.wait()


def _frame(kind: bytes, content: bytes) -> bytes:
    return _HEAD.pack(kind, len(content)) + content


def main() -> None:
    """Answer frames until standard input ends."""
    frames = _received()
    job = marshal.loads(next(frames))
    answers: Answers = resolve_name(job["task"])(job["settings"])
    if sys.platform != "win32":
        os.nice(_NICE if job["background"] else 0)
        _limit_memory(job["memory"])
    for question in frames:
        kind = _FAILED
        _allow(job["seconds"])
        try:
            content = answers(question)
            kind = _ANSWER
        except RefusedError as error:
            kind, content = _REFUSED, _reason(str(error))
        except MemoryError:
            content = _reason(f"it needs more than {job['memory'] >> 20} MiB of memory")
        except FailedError as error:
            content = _reason(str(error))
        except Exception as error:  # what a client's or a checkpoint's text raises
            content = _reason(f"{type(error).__name__}: {error}")
        _allow(0)
        sys.stdout.buffer.write(_frame(kind, content))
        sys.stdout.buffer.flush()


def _reason(text: str) -> bytes:
    return text[:_REASON].encode("utf-8", "surrogatepass")


def _received() -> Iterator[bytes]:
    source = sys.stdin.buffer
    while len(head := source.read(_HEAD.size)) == _HEAD.size:
        yield source.read(_HEAD.unpack(head)[1])


def _limit_memory(size: int) -> None:
    """Let the process have at most `size` bytes of address space, and write no file of its memory when it dies."""
    import resource

    for kind, most in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        # A system may refuse a limit. Time and length are limited all the same.
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))


def _allow(seconds: float) -> None:
    """End the process after so many seconds of processor time from now; 0 takes the limit back."""
    if sys.platform != "win32":
        # Nobody handles SIGPROF here, so it ends the process even inside of one long operation.
        signal.setitimer(signal.ITIMER_PROF, seconds)
