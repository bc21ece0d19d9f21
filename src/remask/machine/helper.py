"""Helper processes with limits of time and memory, for input that clients or checkpoints have written.

Both sides send frames: a byte for the kind of frame, a length of eight bytes, and the content. The first frame names
the task and its limits; each later one is a question, which the helper answers with a frame. A task is a function that
gets its settings once, and returns the function that answers questions. A question that takes too long ends the
process, by a signal that nothing in it can catch.

A helper runs `main`, and imports only this file and its task of remask, so that it is small and starts quickly.
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
"""Answers a question of a task. Raises `RefusedError` or `FailedError`; any other exception is a failure too."""

_HEAD = struct.Struct("<cQ")
_QUESTION, _ANSWER, _REFUSED, _FAILED = b"Q", b"A", b"R", b"F"
_MAX_REASON = 500  # characters of the reason that an error carries
_NICE = 5
_PROGRAM = "from remask.machine.helper import main; main()"


class RefusedError(Exception):
    """A task refuses a question; the text is the reason."""


class FailedError(Exception):
    """A task fails on a question; the text is the reason."""


class HelperError(Exception):
    """A helper gave no answer: the task failed, exceeded a limit, or its process ended. The text says which."""


class LateError(HelperError):
    """A helper took longer than the caller's `wait`."""


class StartError(HelperError):
    """The system starts no helper now."""


class Helpers:
    """Processes of one task, one for each thread that asks at the same time.

    A process is started when it is needed, used again for later questions, and replaced if it has ended. It ends with
    this object, or with the process that made it.

    Args:
        task: the function of the task, as "module:name".
        settings: argument of that function.
        seconds: processor time of one answer, at most.
        memory: bytes of address space of a process, at most.
        background: whether the processes have a low priority.
        wait: seconds of wall time after which an answer is late; None: no limit.
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
        self._seconds = seconds
        self._memory = memory
        self._wait = wait
        self.idle: list[Helper] = []
        weakref.finalize(self, _end, self.idle)

    def ask(self, question: bytes) -> bytes:
        """The answer of a process to `question`. Safe on any thread; the interpreter's lock is not held meanwhile.

        Raises `RefusedError` if the task does, `LateError` after `wait` seconds, and `HelperError` if there is no
        answer.
        """
        helper = self._take()
        late = threading.Event()
        alarm = None if self._wait is None else threading.Timer(self._wait, _kill_late, (helper, late))
        try:
            if alarm is not None:
                alarm.start()
            kind, content = _exchange(helper, question)
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
            limit = f"{self._memory >> 20} MiB"
            raise HelperError(f"its process ended with status {helper.returncode}, maybe for want of memory ({limit})")
        self.idle.append(helper)
        if kind == _ANSWER:
            return content
        reason = content.decode("utf-8", "surrogatepass")
        raise RefusedError(reason) if kind == _REFUSED else HelperError(reason)

    def close(self) -> None:
        """End the idle processes."""
        _end(self.idle)

    def _take(self) -> Helper:
        """An idle process, or a new one. The caller has it alone. Raises `StartError`."""
        while self.idle:
            with suppress(IndexError):  # another thread was quicker
                helper = self.idle.pop()
                if helper.poll() is None:
                    return helper
                _end([helper])
        # `-P`: files in the working directory must not replace modules. In a session of its own, the process does not
        # get an interrupt from the terminal.
        command = [sys.executable, "-P", "-c", _PROGRAM]
        try:
            helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as error:  # for lack of memory, files or processes
            raise StartError(f"its process cannot be started: {error.strerror or error}") from error
        assert helper.stdin is not None
        with suppress(BrokenPipeError):  # as in `_exchange`
            helper.stdin.write(_frame(_QUESTION, self._job))
        return helper


def _exchange(helper: Helper, question: bytes) -> tuple[bytes | None, bytes]:
    """Send `question`, and return kind and content of the answer. The kind is None if the process has ended."""
    assert helper.stdin is not None
    assert helper.stdout is not None
    with suppress(BrokenPipeError):  # the process has ended, so there will be no answer
        helper.stdin.write(_frame(_QUESTION, question))
        helper.stdin.flush()
    head = helper.stdout.read(_HEAD.size)
    if len(head) == _HEAD.size:
        kind, length = _HEAD.unpack(head)
        content = helper.stdout.read(length)
        if len(content) == length:  # shorter if the process has ended meanwhile, such as for lack of memory
            return kind, content
    return None, b""


def _kill_late(helper: Helper, late: threading.Event) -> None:
    """Set `late`, then kill the process, which ends the wait for its answer."""
    late.set()
    helper.kill()


def _end(helpers: list[Helper]) -> None:
    """Kill processes and close their pipes. The status of a process that has already ended is unchanged."""
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
    frames = _read_frames()
    job = marshal.loads(next(frames))
    answers: Answers = resolve_name(job["task"])(job["settings"])
    if sys.platform != "win32":
        os.nice(_NICE if job["background"] else 0)
        _limit_memory(job["memory"])
    for question in frames:
        kind = _FAILED
        _limit_time(job["seconds"])
        try:
            content = answers(question)
            kind = _ANSWER
        except RefusedError as error:
            kind, content = _REFUSED, _encode_reason(str(error))
        except MemoryError:
            content = _encode_reason(f"it needs more than {job['memory'] >> 20} MiB of memory")
        except FailedError as error:
            content = _encode_reason(str(error))
        except Exception as error:  # a client's or a checkpoint's text may raise anything
            content = _encode_reason(f"{type(error).__name__}: {error}")
        _limit_time(0)
        sys.stdout.buffer.write(_frame(kind, content))
        sys.stdout.buffer.flush()


def _encode_reason(text: str) -> bytes:
    return text[:_MAX_REASON].encode("utf-8", "surrogatepass")


def _read_frames() -> Iterator[bytes]:
    """Yield the content of each frame of standard input, until it ends."""
    source = sys.stdin.buffer
    while len(head := source.read(_HEAD.size)) == _HEAD.size:
        yield source.read(_HEAD.unpack(head)[1])


def _limit_memory(size: int) -> None:
    """Limit this process to `size` bytes of address space, and disable core dumps."""
    import resource

    for kind, limit in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        # A system may refuse a limit. Time and length are still limited.
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))


def _limit_time(seconds: float) -> None:
    """End this process after `seconds` of processor time from now; 0 removes the limit."""
    if sys.platform != "win32":
        # Nobody handles SIGPROF here, so it ends the process even inside of one long operation.
        signal.setitimer(signal.ITIMER_PROF, seconds)
