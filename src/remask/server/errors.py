"""HTTP errors in the form that OpenAI's API uses."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from remask.errors import ConfigError, DrainingError, EngineDeadError, QueueFullError, RemaskError, UnknownNameError
from remask.server.fields import FOREIGN, FOREIGN_TO_READS
from remask.server.protocol.generation import ChatBody, CompletionBody
from remask.server.protocol.reads import DecisionsBody, RerankBody, ScoreBody
from remask.server.surfaces.messages_body import FOREIGN_TO_MESSAGES, MessagesBody
from remask.server.surfaces.responses_body import FOREIGN_TO_RESPONSES, ResponsesBody

_INVALID = "invalid_request_error"
_CODES = {
    401: (_INVALID, "invalid_api_key"),
    404: (_INVALID, "not_found"),
    405: (_INVALID, "method_not_allowed"),
    408: (_INVALID, "request_timeout"),
    409: (_INVALID, "conflict"),
    413: (_INVALID, "request_too_large"),
    429: ("rate_limit_error", "queue_full"),
    431: (_INVALID, "headers_too_large"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "draining"),
    504: ("server_error", "deadline_exceeded"),
}
MAX_SHOWN_PATH = 100  # characters of a path in its error
MESSAGES_PATH = "/v1/messages/"
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_BODIES = (ChatBody, CompletionBody, DecisionsBody, ScoreBody, RerankBody, ResponsesBody, MessagesBody)
_FOREIGN = (FOREIGN, FOREIGN_TO_READS, FOREIGN_TO_RESPONSES, FOREIGN_TO_MESSAGES)
FIELDS = frozenset(name for each in (*(body.model_fields for body in _BODIES), *_FOREIGN) for name in each)
_RETRY = {429: "1", 503: "5"}


class ApiError(RemaskError):
    """An error with an HTTP status. `param` names the field that caused it, or is None."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def as_api_error(error: RemaskError) -> ApiError:
    """Return the error with the HTTP status that belongs to its class."""
    if isinstance(error, ApiError):
        return error
    statuses = {QueueFullError: 429, DrainingError: 503, EngineDeadError: 500, ConfigError: 400}
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 500)
    return ApiError(status, str(error), _named_field(error) if status == 400 else None)


def error_object(error: RemaskError) -> dict[str, Any]:
    """Return the body `{"error": {...}}`. A stream that fails sends it as its last event."""
    known = as_api_error(error)
    kind, code = _CODES.get(known.status, (_INVALID, None))
    return {"error": {"message": str(known), "type": kind, "param": known.param, "code": known.code or code}}


def messages_error(error: RemaskError, request_id: str | None = None) -> dict[str, Any]:
    """The same in Anthropic's form, for `/v1/messages`."""
    known = as_api_error(error)
    told = {"type": _MESSAGES_TYPES.get(known.status, _INVALID), "message": str(known)}
    return {"type": "error", "error": told, "request_id": request_id}


def error_response(error: RemaskError, scope: Scope | None = None) -> Response:
    """Return the response to a request that failed before any byte of its answer was sent.

    It has the form of the API whose path is in `scope`, OpenAI's without one.
    """
    status = as_api_error(error).status
    headers = {"Retry-After": _RETRY[status]} if status in _RETRY else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if scope is not None and (f"{scope['path']}/").startswith(MESSAGES_PATH):
        return json_response(messages_error(error, scope.get("state", {}).get("request_id")), status, headers)
    return json_response(error_object(error), status, headers)


def json_response(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response in ASCII. Texts of requests may hold lone surrogates, which UTF-8 cannot encode."""
    return Response(json.dumps(value), status, dict(headers or {}), "application/json")


def add_handlers(app: FastAPI) -> None:
    """Install handlers that answer every error in OpenAI's form."""

    @app.exception_handler(RemaskError)
    async def _remask(request: Request, error: Exception) -> Response:
        assert isinstance(error, RemaskError)
        return error_response(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = error.errors()
        # FastAPI does not parse a body of another content type, so its own message would not help.
        if _field(problems[0]) is None and "json" not in request.headers.get("content-type", ""):
            plain = ApiError(400, "the body must be JSON: send the header 'Content-Type: application/json'")
            return error_response(plain, request.scope)
        return error_response(invalid_body(problems), request.scope)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        cause = error.__cause__
        if isinstance(cause, ValueError | RecursionError):
            unread = ApiError(400, f"the body is not JSON that can be read: {cause}")
            return error_response(unread, request.scope)
        return error_response(ApiError(error.status_code, _explained(error, request)), request.scope)


def _explained(error: HTTPException, request: Request) -> str:
    """What is said of an error of the routing: the nearest path, or the methods that a path takes."""
    path = request.url.path[:MAX_SHOWN_PATH]
    if error.status_code == 405:
        return f"{path} takes {(error.headers or {}).get('Allow', 'other methods')}, and no {request.method}"
    if error.status_code != 404 or error.detail != "Not Found":
        return str(error.detail)
    known: Sequence[str] = request.app.state.paths
    # A base URL with one /v1 too many or too few, or with none, is the commonest cause.
    own = [each for each in known if f"/{each.strip('/')}".endswith(f"/{path.strip('/').rpartition('v1/')[2]}")]
    near = own or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]}? " if near else ""
    return f"there is no path {path!r}. {hint}GET /openapi.json lists all of them"


def invalid_body(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return an error 400 that names the first invalid field and the reason."""
    first = problems[0]
    field = _field(first)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    # A field that allows several types has one problem for each type; an error of our own says more than the others.
    causes = [problem.get("ctx", {}).get("error") for problem in problems if _field(problem) == field]
    cause = next((each for each in causes if isinstance(each, RemaskError)), None)
    if cause is not None:
        error = as_api_error(cause)
        named = error.param if causes[0] is cause else None
        return ApiError(error.status, str(error), named or field, error.code)
    if field is None and first["type"] in ("missing", "model_attributes_type"):
        return ApiError(400, "the body must be an object, such as '{\"model\": ...}'")
    if first["type"] == "string_unicode":
        return ApiError(
            400, f"{field or 'the body'}: the text is not valid Unicode. Remove the lone surrogates.", field
        )
    messages = dict.fromkeys(str(p["msg"]) for p in problems if _field(p) == field)
    text = "; or ".join(list(messages)[:3])
    return ApiError(400, f"{field or 'the body'}: {text}", field)


def _field(problem: Mapping[str, Any]) -> str | None:
    """Return the path of the field, such as `messages.0.role`; None for the body as a whole."""
    path = [str(part) for part in problem["loc"][1:]]  # the first part is `body`, `query` or `path`
    depth = 3 if path[:1] == ["messages"] else 1
    return ".".join(path[:depth]) or None


def _named_field(error: RemaskError) -> str | None:
    """Return the field that the message of a `ConfigError` begins with; None if it begins with another word."""
    if isinstance(error, UnknownNameError):
        return error.name if error.kind == "field" else error.kind if error.kind in FIELDS else None
    word = re.split(r"[ =:.\[]", str(error), maxsplit=1)[0]
    return word if word in FIELDS else None
