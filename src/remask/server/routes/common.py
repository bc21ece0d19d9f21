"""Functions that several endpoints use."""

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
    schema = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    content = {"application/json": {"schema": schema}}
    return {status: {"description": "Error", "content": content} for status in statuses}
