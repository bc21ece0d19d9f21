"""The OpenAPI document: answers and errors of each endpoint, and the events of its stream."""

from typing import Any, get_args

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from remask.server.schemas.base import Error
from remask.server.schemas.choices import ChatEvent, CompletionEvent
from remask.server.schemas.messages import MessageEvent
from remask.server.schemas.responses import ResponseEvent

REF = "#/components/schemas/{model}"
_STREAMS = (ChatEvent, CompletionEvent, ResponseEvent, MessageEvent)
_HTTP = (401, 403, 408, 413, 500)  # of any path: what the gate refuses, and defects
READS = (400, 404)  # of what reads a body
RUNS = (400, 404, 429, 503, 504)  # of what gives work to the engine


def answers(model: Any, *errors: int, stream: Any = None, error: type[BaseModel] = Error) -> dict[int | str, Any]:
    """The `responses` of a route: `model` with status 200, and `error` with these statuses and those of any path.

    `stream` is the union of the events that the answer is made of where a body asks for a stream, each of which is the
    JSON text behind `data:`.
    """
    told: dict[str, Any] = {"model": model, "description": "The answer."}
    if stream is not None:
        events = {"anyOf": [{"$ref": REF.format(model=each.__name__)} for each in get_args(stream)]}
        told["description"] = "The answer; with `stream` server-sent events, the `data` of each of which is described."
        told["content"] = {"text/event-stream": {"schema": events}}
    failed: dict[int | str, Any] = {status: {"model": error} for status in sorted({*_HTTP, *errors})}
    return {200: told, **failed}


def plain(kind: str) -> dict[int | str, Any]:
    """The same of an answer that is a text of the media type `kind`."""
    failed: dict[int | str, Any] = {status: {"model": Error} for status in _HTTP}
    return {200: {"description": "The answer.", "content": {kind: {"schema": {"type": "string"}}}}, **failed}


class DescribedApp(FastAPI):
    """An application whose document tells of streams too."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        made = super().openapi()
        events = [(each, "serialization") for stream in _STREAMS for each in get_args(stream)]
        _, found = models_json_schema(events, ref_template=REF)  # type: ignore[arg-type]
        schemas = made["components"]["schemas"]
        schemas |= found["$defs"]
        # FastAPI's own answer to a body that does not fit, which is a 400 here.
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        return made
