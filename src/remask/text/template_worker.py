"""Renders one chat template in a process of its own. `remask.text.chat_template` starts it and speaks to it.

Both send frames (`remask.text.workers`): a byte that says what it is, a length of eight bytes, and so many bytes of
content. What this process gets is of Python's `marshal`, which is read fastest: first the template, the variables that
all conversations share and the limits; then one conversation a frame. What it sends is text: a rendered conversation,
why the template refuses it, or how the template failed. What takes too long ends the process, by a signal that no
template can catch.

The file runs as a program. It imports nothing of remask, so that a process is small and starts quickly.
"""

import json
import marshal
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

HEAD = struct.Struct("<cQ")
TEXT, REFUSED, FAILED = b"T", b"R", b"F"
_REASON = 500  # characters of the reason that an error carries


class TooLongError(Exception):
    """A text is longer than it may be."""


class _Generation(Extension):
    """The block `{% generation %}`, in which templates put the assistant's words. It renders as what it holds."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Names(Namespace):
    """The object of `namespace()`, without names that Python itself uses."""

    def __init__(*args: Any, **values: Any) -> None:
        Namespace.__init__(*args, **values)
        for name in dict(*args[1:], **values):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compiled(text: str) -> Template:
    """The template, with the functions, filters and blocks that chat templates of the hub may use.

    Raises what Jinja raises on a text that is no template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_now, namespace=_Names)
    return environment.from_string(text)


def rendered(template: Template, values: Mapping[str, Any], longest: int) -> str:
    """The text of a conversation, of at most `longest` characters.

    Raises `TooLongError` on more, and whatever the template raises.
    """
    pieces, length = [], 0
    for piece in template.generate(values):
        length += len(piece)
        if length > longest:
            raise TooLongError(f"it writes more than {longest} characters")
        pieces.append(piece)
    return "".join(pieces)


def main() -> None:
    """Answer frames until standard input ends."""
    frames = received()
    job = marshal.loads(next(frames))
    if sys.platform != "win32":
        limit_memory(job["bytes"])
    template: Template | None = None
    for given in frames:
        kind = FAILED
        allow(job["seconds"])
        try:
            template = template or compiled(job["template"])
            text = rendered(template, {**job["variables"], **marshal.loads(given)}, job["longest"])
            kind = TEXT
        except TemplateError as error:
            kind, text = REFUSED, str(error)[:_REASON]
        except TooLongError as error:
            text = str(error)
        except MemoryError:
            text = f"it needs more than {job['bytes'] >> 20} MiB of memory"
        except RecursionError:
            text = "it calls itself too often"
        except Exception as error:  # a template's expressions raise whatever Python's do
            text = f"{type(error).__name__}: {error}"[:_REASON]
        allow(0)
        send(kind, text.encode("utf-8", "surrogatepass"))


def received() -> Iterator[bytes]:
    """The contents of frames, until standard input ends."""
    source = sys.stdin.buffer
    while len(head := source.read(HEAD.size)) == HEAD.size:
        yield source.read(HEAD.unpack(head)[1])


def send(kind: bytes, content: bytes) -> None:
    """Answer with a frame."""
    for part in (HEAD.pack(kind, len(content)), content):
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def limit_memory(size: int) -> None:
    """Let the process have at most `size` bytes of address space, and write no file of its memory when it dies."""
    import resource

    for kind, most in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CORE, 0)):
        # A system may refuse a limit. Time and length are limited all the same.
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))


def allow(seconds: float) -> None:
    """End the process after so many seconds of processor time from now; 0 takes the limit back."""
    if sys.platform != "win32":
        # Nobody handles SIGPROF here, so it ends the process even inside of one long operation.
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
