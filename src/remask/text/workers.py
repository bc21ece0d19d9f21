"""Processes of our own that answer frames: a byte that says what a frame is, a length, and so many bytes of content."""

import subprocess
import weakref
from collections.abc import Sequence
from contextlib import suppress

from remask.text.template_worker import HEAD

Worker = subprocess.Popen[bytes]


class WorkerEndedError(Exception):
    """A process ended instead of answering, by itself or by a limit. `status` is its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"its process ended with status {status}")
        self.status = status


class FrameWorkers:
    """Processes that run one program, one for each thread that asks at the same time.

    A process is started when it is first needed, kept for the next question, and replaced where it has ended. It ends
    with this object, or with the process that made it.

    Args:
        command: the words that start the program. It reads `job` first, and then answers each frame with a frame.
        job: the content of the first frame.
    """

    def __init__(self, command: Sequence[str], job: bytes) -> None:
        self._command, self._job = list(command), job
        self.idle: list[Worker] = []
        weakref.finalize(self, _end, self.idle)

    def ask(self, content: bytes) -> tuple[bytes, bytes]:
        """The kind and the content of a process' answer. Safe on any thread.

        The interpreter's lock is not held meanwhile.

        Raises:
            WorkerEndedError: the process has ended; the next question goes to another one.
        """
        worker = self._take()
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            with suppress(BrokenPipeError):  # a process that has ended answers nothing
                worker.stdin.write(frame(content))
                worker.stdin.flush()
            head = worker.stdout.read(HEAD.size)
            if len(head) == HEAD.size:
                kind, length = HEAD.unpack(head)
                answer = worker.stdout.read(length)
                if len(answer) == length:  # less of a process that was ended meanwhile, such as for want of memory
                    self.idle.append(worker)
                    return kind, answer
        except BaseException:
            _end([worker])
            raise
        _end([worker])
        raise WorkerEndedError(worker.returncode)

    def close(self) -> None:
        """End the processes that answer nothing now."""
        _end(self.idle)

    def _take(self) -> Worker:
        """A process that nobody else speaks to."""
        while self.idle:
            with suppress(IndexError):  # another thread was quicker
                worker = self.idle.pop()
                if worker.poll() is None:
                    return worker
                _end([worker])
        # The session of its own keeps an interrupt in the terminal from it.
        worker = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert worker.stdin is not None
        with suppress(BrokenPipeError):  # as in `ask`
            worker.stdin.write(frame(self._job))
        return worker


def frame(content: bytes) -> bytes:
    """A frame of `content`."""
    return HEAD.pack(b" ", len(content)) + content


def _end(workers: list[Worker]) -> None:
    """End processes and close what leads to them. The status of one that has ended by itself is kept."""
    while workers:
        worker = workers.pop()
        worker.kill()
        for pipe in (worker.stdin, worker.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        worker.wait()
