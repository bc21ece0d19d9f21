"""The OpenAPI document: answers and errors of each endpoint, and the events of its stream."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from fastapi import APIRouter, FastAPI, Response
from pydantic import TypeAdapter

from remask.server.errors import Error

_REF = "#/components/schemas/{model}"
_ANY_PATH = (401, 403, 408, 413, 500)  # what the gate refuses, and defects
READS = (400, 404)  # of what reads a body
RUNS = (400, 404, 429, 503, 504)  # of what gives work to the engine


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint, as it is served and as the document tells of it.

    Attributes:
        methods: such as `GET`.
        answer: the class of the answer, or the media type of one that is a text.
        statuses: those of its errors, beside what the gate and defects answer on any path.
        stream: the union of the events that the answer is made of where a body asks for a stream, each of which is the
            JSON text behind `data:`.
        error: the form of its errors.
        others: further paths that the document does not tell of.
    """

    methods: str
    path: str
    call: Callable[..., Awaitable[Response]]
    answer: Any
    statuses: Sequence[int] = ()
    stream: Any = None
    error: type[Any] = Error
    others: Sequence[str] = ()

    def add(self, router: APIRouter) -> None:
        """Serve it."""
        how: dict[str, Any] = {"response_class": Response} if isinstance(self.answer, str) else {}
        for method in self.methods.split():
            router.add_api_route(self.path, self.call, methods=[method], responses=self.responses, **how)
        for path in self.others:
            router.add_api_route(path, self.call, methods=[self.methods], include_in_schema=False)

    @property
    def responses(self) -> dict[int | str, Any]:
        """The answer and the errors, by status."""
        told: dict[str, Any] = {"description": "The answer."}
        if isinstance(self.answer, str):
            told["content"] = {self.answer: {"schema": {"type": "string"}}}
        else:
            told["model"] = self.answer
        if self.stream is not None:
            events = {"anyOf": [{"$ref": _REF.format(model=each.__name__)} for each in get_args(self.stream)]}
            told["description"] = (
                "The answer; with `stream` server-sent events, the `data` of each of which is described."
            )
            told["content"] = {"text/event-stream": {"schema": events}}
        failed: dict[int | str, Any] = {
            status: {"model": self.error} for status in sorted({*_ANY_PATH, *self.statuses})
        }
        return {200: told, **failed}


class DescribedApp(FastAPI):
    """An application whose document tells of the events of its `streams` too."""

    streams: Sequence[Any] = ()

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        made = super().openapi()
        schemas = made["components"]["schemas"]
        events: list[Any] = [(each, "serialization", TypeAdapter(each)) for each in self.streams]
        _, found = TypeAdapter.json_schemas(events, ref_template=_REF)
        schemas |= found["$defs"]
        # FastAPI's own answer to a body that does not fit, which is a 400 here.
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        return made
