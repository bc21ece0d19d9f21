"""Errors in OpenAI's shape."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from remask.errors import ConfigError, DrainingError, EngineDeadError, QueueFullError, RemaskError, UnknownNameError
from remask.server.neutral import NEUTRAL
from remask.server.protocol import ChatBody, CompletionBody

_INVALID = "invalid_request_error"
_CODES = {
    401: (_INVALID, "invalid_api_key"),
    404: (_INVALID, "not_found"),
    405: (_INVALID, "method_not_allowed"),
    409: (_INVALID, "conflict"),
    413: (_INVALID, "request_too_large"),
    429: ("rate_limit_error", "queue_full"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "draining"),
    504: ("server_error", "deadline_exceeded"),
}
FIELDS = frozenset([*ChatBody.model_fields, *CompletionBody.model_fields, *NEUTRAL])
_RETRY = {429: "1", 503: "5"}


class ApiError(RemaskError):
    """An answer other than 200. `param` is the field that is to blame, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def as_api_error(error: RemaskError) -> ApiError:
    """The HTTP status of an error of our own tree."""
    if isinstance(error, ApiError):
        return error
    statuses = {QueueFullError: 429, DrainingError: 503, EngineDeadError: 500, ConfigError: 400}
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 500)
    return ApiError(status, str(error), _named_field(error) if status == 400 else None)


def error_object(error: RemaskError) -> dict[str, Any]:
    """`{"error": {...}}`, also the last event of a stream that failed."""
    told = as_api_error(error)
    kind, code = _CODES.get(told.status, (_INVALID, None))
    return {"error": {"message": str(told), "type": kind, "param": told.param, "code": told.code or code}}


def error_response(error: RemaskError) -> Response:
    """The answer to a request that failed before anything was sent."""
    status = as_api_error(error).status
    headers = {"Retry-After": _RETRY[status]} if status in _RETRY else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_object(error), status, headers)


def json_response(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII: texts from requests may hold lone surrogates, which UTF-8 cannot carry."""
    return Response(json.dumps(value), status, dict(headers or {}), "application/json")


def add_handlers(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape."""

    @app.exception_handler(RemaskError)
    async def _ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RemaskError)
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = error.errors()
        # What is sent as anything else is not read, and what would be said of its bytes helps nobody.
        if _field(problems[0]) is None and "json" not in request.headers.get("content-type", ""):
            return error_response(
                ApiError(400, "the body must be JSON: send the header 'Content-Type: application/json'")
            )
        return error_response(invalid_body(problems))

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        cause = error.__cause__
        if isinstance(cause, ValueError | RecursionError):
            return error_response(ApiError(400, f"the body is not JSON that can be read: {cause}"))
        return error_response(ApiError(error.status_code, str(error.detail)))


def invalid_body(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """A 400 that names the first bad field and says what is wrong with it."""
    first = problems[0]
    field = _field(first)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RemaskError):
        told = as_api_error(cause)
        return ApiError(told.status, str(told), told.param or field, told.code)
    if field is None and first["type"] in ("missing", "model_attributes_type"):
        return ApiError(400, "the body must be an object, such as '{\"model\": ...}'")
    # A field of several types has one problem for each of them.
    messages = dict.fromkeys(str(p["msg"]) for p in problems if _field(p) == field)
    text = "; or ".join(list(messages)[:3])
    return ApiError(400, f"{field or 'the body'}: {text}", field)


def _field(problem: Mapping[str, Any]) -> str | None:
    """Where a problem is, such as `messages.0.role`; the body itself has no name."""
    path = [str(part) for part in problem["loc"][1:]]  # the first says where it stood: body, query or path
    depth = 3 if path[:1] == ["messages"] else 1
    return ".".join(path[:depth]) or None


def _named_field(error: RemaskError) -> str | None:
    """The field that a `ConfigError` names first, as those of the sampling parameters do."""
    if isinstance(error, UnknownNameError):
        return error.name if error.kind == "field" else error.kind if error.kind in FIELDS else None
    word = re.split(r"[ =:.\[]", str(error), maxsplit=1)[0]
    return word if word in FIELDS else None
