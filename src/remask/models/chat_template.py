"""Chat templates: programs of whoever made a checkpoint. They run in processes of their own, with limits."""

import marshal
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from remask.errors import ConfigError
from remask.models.template_worker import FAILED, HEAD, REFUSED, TEXT

MAX_SECONDS = 1.0
"""Processor time of one rendering. Ordinary conversations take well under a hundredth of it."""
MAX_BYTES = 512 << 20
"""Memory of a process that renders, of which Python itself takes 24 MiB."""
MAX_CHARACTERS = 8 << 20
"""Length of a rendered conversation: twice the longest request body that a server takes by default."""

_PROGRAM = Path(__file__).with_name("template_worker.py")

Worker = subprocess.Popen[bytes]


class ChatTemplate:
    """A Jinja template and the processes that render it, one for each thread that renders at the same time.

    A process is started when it is first needed, kept for the next conversation, and replaced where a rendering had to
    be ended. It ends with this object, or with the process that made it.

    Args:
        text: the template.
        variables: what it reads beside the conversation, such as the special tokens.
    """

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        limits = {"seconds": MAX_SECONDS, "bytes": MAX_BYTES, "longest": MAX_CHARACTERS}
        self._job = _frame({"template": text, "variables": dict(variables), **limits})
        self._idle: list[Worker] = []
        weakref.finalize(self, _end, self._idle)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. Safe on any thread; the interpreter's lock is not held meanwhile.

        `variables` are further ones that the template reads, such as `enable_thinking` and `tools`.

        Raises:
            ConfigError: the template refuses the conversation, fails on it, or goes beyond a limit; or `variables` hold
                a name that stands for the conversation.
        """
        # A key without a value is left out: templates ask whether a key is there.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {"messages": chat, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        taken = sorted((set(values) - {"tools"}) & set(variables or {}))
        if taken:
            raise ConfigError(f"chat_template_kwargs: {taken[0]} is no variable to choose; leave it out")
        values |= variables or {}
        try:
            frame = _frame(values)
        except ValueError as error:
            raise ConfigError(
                f"messages and chat_template_kwargs must hold texts, numbers, lists and objects only: {error}"
            ) from error
        kind, text = self._ask(frame)
        if kind == TEXT:
            return text
        verb = "refuses" if kind == REFUSED else "fails on"
        raise ConfigError(f"The model's chat template {verb} these messages: {text}")

    def _ask(self, frame: bytes) -> tuple[bytes, str]:
        """What a process answers: the kind of the answer, and its text."""
        worker = self._take()
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            with suppress(BrokenPipeError):  # a process that has ended answers nothing
                worker.stdin.write(frame)
                worker.stdin.flush()
            head = worker.stdout.read(HEAD.size)
            if len(head) == HEAD.size:
                kind, length = HEAD.unpack(head)
                content = worker.stdout.read(length)
                if len(content) == length:  # less of a process that was ended meanwhile, such as for want of memory
                    self._idle.append(worker)
                    return kind, content.decode("utf-8", "surrogatepass")
        except BaseException:
            _end([worker])
            raise
        _end([worker])
        if sys.platform != "win32" and worker.returncode == -signal.SIGPROF:
            return FAILED, f"it takes more than {MAX_SECONDS:g} s of processor time"
        return FAILED, f"its process ended with status {worker.returncode}"

    def _take(self) -> Worker:
        """A process that nobody else speaks to."""
        while self._idle:
            with suppress(IndexError):  # another thread was quicker
                worker = self._idle.pop()
                if worker.poll() is None:
                    return worker
                _end([worker])
        # `-P`: a file beside the program must not stand for a module of the standard library. The session of its own
        # keeps an interrupt in the terminal from it.
        worker = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert worker.stdin is not None
        with suppress(BrokenPipeError):  # as in `_ask`
            worker.stdin.write(self._job)
        return worker


def _frame(value: dict[str, Any]) -> bytes:
    """A frame of `value`. Raises `ValueError` where it holds other than Python's own plain objects."""
    content = marshal.dumps(value)
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
