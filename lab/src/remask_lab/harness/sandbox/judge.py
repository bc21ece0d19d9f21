"""The program that runs the tests, apart from the code under test.

The tests see a stand-in for each function of the solution. A stand-in sends the arguments to the candidate's process
and returns a copy of the result, so nothing that the generated code does to its own interpreter reaches the
assertions. The exit status is the verdict: `PASSED` where the last test has run, `FAILED` or `ENDED` otherwise, with
the reason on standard output.
"""

import builtins
import json
import os
import signal
import symtable
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from remask_lab.harness.sandbox import linux
from remask_lab.harness.sandbox.limits import limit_resources
from remask_lab.harness.sandbox.values import LINE_BYTES, decode, encode, one_line

PASSED: Final = 0
FAILED: Final = 1
ENDED: Final = 3
"""The candidate's process ended before the tests did."""

# Raised within an iteration, these end it as if it were done, and the rest of the tests with it.
_ENDING: Final = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit"})


class RaisedError(Exception):
    """An exception of the candidate whose class has no counterpart among the built-in ones."""


class Remote:
    """Stands in for an object of the candidate: calls, and reads and writes of attributes, go there.

    It is equal to itself alone. Special methods of the object have no effect here.
    """

    __slots__ = ("_link", "_number")

    def __init__(self, link: "Link", number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the object returns."""
        return self._link.call(self._number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask({"do": "get", "on": self._number, "name": name})

    def __setattr__(self, name: str, value: Any) -> None:
        given = encode(value, self._link.refer)
        self._link.ask({"do": "set", "on": self._number, "name": name, "given": given})


class Link:
    """The line to the candidate. What goes wrong on it ends this process with the verdict `ENDED` or `FAILED`."""

    def __init__(self, link: int, verdict: int) -> None:
        self._reader, self._writer = os.fdopen(link, "rb"), os.fdopen(os.dup(link), "wb")
        self._verdict = verdict
        self._remotes: dict[int, Remote] = {}

    def end(self, status: int, reason: str = "") -> NoReturn:
        """End this process. Nothing in a test can catch this."""
        os.write(self._verdict, one_line(reason).encode("utf-8", "replace"))
        os._exit(status)

    def begin(self) -> None:
        """Wait until the generated code has run. Raises what it raised."""
        self._value(self._receive())

    def name(self, name: str) -> tuple[bool, Any]:
        """Whether the solution defines `name`, and its value."""
        answer = self._exchange({"do": "name", "name": name})
        return (False, None) if answer.get("missing") else (True, self._value(answer))

    def ask(self, asked: dict[str, Any]) -> Any:
        """The value that the candidate answers with. Raises what it raised."""
        return self._value(self._exchange(asked))

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the object `number` returns when called. Arguments that it changed in place are changed here too."""
        listed = list(args)
        answer = self._exchange({"do": "call", "on": number, "given": encode([listed, kwargs], self.refer)})
        value = self._value(answer)
        if "given" in answer:
            changed, named = self._decode(answer["given"])
            for old, new in [
                *zip(listed, changed, strict=False),
                *((kwargs[name], named.get(name)) for name in kwargs),
            ]:
                _assign(old, new)
        return value

    def refer(self, value: Any) -> int:
        """The number of a stand-in. Raises `TypeError` for an object that exists in this process only."""
        if isinstance(value, Remote):
            return int(value._number)
        raise TypeError(f"a test hands over a {type(value).__name__}, which cannot be copied to the code under test")

    def _exchange(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            self._writer.write(json.dumps(asked).encode() + b"\n")
            self._writer.flush()
        except OSError:
            self.end(ENDED)
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._reader.readline(LINE_BYTES)
        except OSError:
            line = b""
        if not line:
            self.end(ENDED)
        if not line.endswith(b"\n"):
            self.end(FAILED, f"it returned more than {LINE_BYTES} bytes, or ended within an answer")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            self.end(FAILED, "it sent an answer that is not JSON")
        if not isinstance(answer, dict):
            self.end(FAILED, "it sent an answer that is not an object")
        return answer

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" in answer:
            raise _raised(answer["error"], answer.get("text"))
        return self._decode(answer.get("value"))

    def _decode(self, data: Any) -> Any:
        try:
            return decode(data, lambda number: self._remotes.setdefault(number, Remote(self, number)))
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            self.end(FAILED, f"it sent a value that cannot be read: {error}")


def _raised(names: Any, text: Any) -> Exception:
    """The candidate's exception as one of ours: the most special built-in class that it derives from."""
    names, text = [str(name) for name in names], str(text)
    for name in names:
        kind = getattr(builtins, name, None)
        if name in _ENDING or name in ("BaseException", "BaseExceptionGroup", "Exception"):
            break
        # Some classes, such as UnicodeDecodeError's, take other arguments than one text.
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
            return kind(text)
    return RaisedError(f"{names[0]}: {text}" if names else text)


def _assign(old: Any, new: Any) -> None:
    """Give a container the contents of another one of its type; other values stay."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)


def _free_names(source: str) -> set[str]:
    """The global names that `source` reads and does not define; built-in ones only where there are no others."""
    top = symtable.symtable(source, "<tests>", "exec")
    defined = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    free = {name for name in _read_names(top, top) if name not in defined}
    ours = {name for name in free if hasattr(builtins, name)}
    # A solution may be called `sum`. It must not replace the `all` around the calls of its function.
    return free - ours or ours


def _read_names(table: symtable.SymbolTable, top: symtable.SymbolTable) -> Iterator[str]:
    for each in table.get_symbols():
        if each.is_referenced() and (table is top or each.is_global()):
            yield each.get_name()
    for inner in table.get_children():
        yield from _read_names(inner, top)


def _run(link: Link, before: str, tests: str, entry: str) -> None:
    """Run the tests. Raises what they raise."""
    link.begin()
    space: dict[str, Any] = {"__name__": "tests"}

    def define(name: str) -> None:
        there, value = link.name(name)
        if there:
            space[name] = value

    for name in () if entry else sorted(_free_names(f"{before}\n{tests}")):
        define(name)
    exec(compile(before, "<before>", "exec"), space)
    # Of all that `before` defines, the function under test alone is the solution's.
    if entry:
        define(entry)
    exec(compile(tests, "<tests>", "exec"), space)


def _protect(job: dict[str, Any]) -> None:
    """End with the parent, take no more than the limits, and let no process of the same user look in."""
    if sys.platform == "linux":
        linux.end_with_parent(signal.SIGKILL)
        linux.hide_from_peers()
    if os.getppid() != job["parent"]:
        os._exit(FAILED)
    limit_resources(job)


def main() -> None:
    """Judge the job that is JSON on standard input. Does not return."""
    job = json.load(sys.stdin)
    _protect(job)
    verdict, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    link = Link(job["link"], verdict)
    try:
        _run(link, job["before"], job["tests"], job["entry"])
    except BaseException as error:
        # RaisedError names the candidate's own class.
        text = str(error) if type(error) is RaisedError else f"{type(error).__name__}: {error}"
        link.end(FAILED, text)
    link.end(PASSED)
