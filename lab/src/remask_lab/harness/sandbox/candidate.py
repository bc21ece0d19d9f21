"""The program that holds the generated code and answers the judge's calls.

Everything in this process may be under the control of the generated code. It knows no test and no expected value, and
what it sends is read as values only.
"""

import json
import os
import sys
from typing import Any

from remask_lab.harness.sandbox.limits import limit_resources
from remask_lab.harness.sandbox.values import decode, encode, one_line


class _Candidate:
    """Answers requests about the objects of one namespace, each request one JSON object."""

    def __init__(self, space: dict[str, Any]) -> None:
        self._space = space
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id; the list keeps each object, so that no id is used twice

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What is sent back: a `value`, `missing`, or an `error`; and the arguments that the call has changed."""
        try:
            return self._answer(asked)
        except BaseException as error:
            return failure(error)

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "name":
            if asked["name"] not in self._space:
                return {"missing": True}
            return {"value": encode(self._space[asked["name"]], self._refer)}
        target = self._objects[asked["on"]]
        if asked["do"] == "get":
            return {"value": encode(getattr(target, asked["name"]), self._refer)}
        given = decode(asked["given"], self._objects.__getitem__)
        if asked["do"] == "set":
            setattr(target, asked["name"], given)
            return {"value": None}
        args, kwargs = given
        value = encode(target(*args, **kwargs), self._refer)
        # Arguments are copies, so what a function does to them in place is sent back for the tests to see.
        after = encode([args, kwargs], self._refer)
        return {"value": value} if after == asked["given"] else {"value": value, "given": after}

    def _refer(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]


def failure(error: BaseException) -> dict[str, Any]:
    """An exception as its classes' names, the most special first, and its text."""
    try:
        text = str(error)
    except BaseException:
        text = "an exception whose text cannot be had"
    return {"error": [kind.__name__ for kind in type(error).__mro__], "text": one_line(text)}


def serve(code: str, link: int) -> None:
    """Run `code`, then answer what is read from the descriptor `link` until its end. Does not return."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    reader, writer = os.fdopen(link, "rb"), os.fdopen(os.dup(link), "wb")
    space: dict[str, Any] = {"__name__": "solution"}

    def send(answer: dict[str, Any]) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.flush()

    try:
        exec(compile(code, "<generated>", "exec"), space)
    except BaseException as error:
        send(failure(error))
        os._exit(1)
    send({"value": None})
    candidate = _Candidate(space)
    for line in reader:
        send(candidate.answer(json.loads(line)))
    os._exit(0)


def main() -> None:
    """Run within a confinement that another program has built: the job is JSON on standard input."""
    job = json.load(sys.stdin)
    limit_resources(job)
    serve(job["code"], job["link"])
