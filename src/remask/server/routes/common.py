"""What endpoints share."""

from typing import Any

from fastapi import Request

from remask.server.service import Service


def service_of(request: Request) -> Service:
    """The service behind the application that `request` came to."""
    service: Service = request.app.state.service
    return service


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Entries of the OpenAPI document for errors, which all have one shape."""
    text = {"type": "string"}
    maybe = {"anyOf": [text, {"type": "null"}]}
    fields = {"message": text, "type": text, "param": maybe, "code": maybe}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    schema = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    content = {"application/json": {"schema": schema}}
    return {status: {"description": "Error", "content": content} for status in statuses}
