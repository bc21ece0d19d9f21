"""The OpenAPI document as a judge of answers: status, media type and every key of what a server has sent."""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import httpx
import jsonschema_rs
from fastapi import FastAPI

ALIASES = {
    "/v1/fim/completions": "/v1/completions",
    "/score": "/v1/score",
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
}


class Described:
    """A document. `seen` are the answers that it has judged: method, path, status and media type."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.seen: set[tuple[str, str, int, str]] = set()
        self._validators: dict[tuple[str, str, int, str], Any] = {}

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        paths = sorted(self.document["paths"], key=lambda path: path.count("{"))
        return [(re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), path) for path in paths]

    def path(self, asked: str) -> str | None:
        """The path of the document that leads to the endpoint that `asked` does; None where it tells of none."""
        named = ALIASES.get(asked, asked)
        return next((path for pattern, path in self._patterns if pattern.fullmatch(named)), None)

    def check(self, response: httpx.Response) -> None:
        """Fail where an answer, read as a whole, is not what the document says; those of other paths pass."""
        asked, kind = response.request, response.headers.get("content-type", "")
        self.judge(asked.method, asked.url.path, response.status_code, kind, response.text)

    def judge(self, method: str, asked: str, status: int, kind: str, text: str) -> None:
        """The same of an answer in pieces."""
        path = self.path(asked)
        if path is None or method.lower() not in self.document["paths"][path]:
            return
        kind = kind.partition(";")[0]
        values: list[Any] = [text]
        if kind == "application/json":
            values = [json.loads(text)]
        elif kind == "text/event-stream":
            values = [*events(text)]
        for value in values:
            self.validate((method.lower(), path, status, kind), value)

    def validate(self, place: tuple[str, str, int, str], value: Any) -> None:
        """Fail where `value` is not of the form that the document tells at `place`."""
        if place not in self._validators:
            method, path, status, kind = place
            told = self.document["paths"][path][method]["responses"]
            assert str(status) in told, f"{method} {path}: the document tells of no {status}: {value}"
            assert kind in told[str(status)]["content"], f"{method} {path}: the document tells of no {kind}"
            schema = {**told[str(status)]["content"][kind]["schema"], "components": self.document["components"]}
            self._validators[place] = jsonschema_rs.validator_for(schema)
        self.seen.add(place)
        wrong = [str(error) for error in self._validators[place].iter_errors(value)]
        assert not wrong, f"{place}: {wrong[0]}\n{value}"


_KEPT: dict[type[FastAPI], Described] = {}


def described(app: FastAPI) -> Described:
    """The document of `app`. It is the same for all applications of the package, so it is made once."""
    if type(app) not in _KEPT:
        _KEPT[type(app)] = Described(app.openapi())
    return _KEPT[type(app)]


def events(text: str) -> Iterator[Any]:
    """The objects of a stream of server-sent events."""
    for line in text.splitlines():
        value = line.removeprefix("data: ")
        if value != line and value != "[DONE]":
            yield json.loads(value)
