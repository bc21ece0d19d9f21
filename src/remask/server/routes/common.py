"""Functions that several endpoints use."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from remask.server.service import Service


def service_of(request: Request) -> Service:
    """Return the service of the application that got `request`."""
    service: Service = request.app.state.service
    return service


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries of the OpenAPI document for these error statuses. All errors have one form."""
    text = {"type": "string"}
    maybe = {"anyOf": [text, {"type": "null"}]}
    fields = {"message": text, "type": text, "param": maybe, "code": maybe}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    return _described(statuses, {"error": error})


def documented_messages() -> dict[int | str, dict[str, Any]]:
    """The same of endpoints that answer errors in Anthropic's form."""
    text = {"type": "string"}
    error = {"type": "object", "properties": {"type": text, "message": text}, "required": ["type", "message"]}
    fields = {"type": {"const": "error"}, "error": error, "request_id": {"anyOf": [text, {"type": "null"}]}}
    return _described((400, 401, 404, 413, 422, 429, 500, 503, 504), fields)


def _described(statuses: Sequence[int], fields: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    content = {"application/json": {"schema": schema}}
    return {status: {"description": "Error", "content": content} for status in statuses}
