"""HTTP errors in the form that OpenAI's API uses."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from remask.checks.fields import Nested, declared
from remask.checks.values import shown
from remask.errors import ConfigError, DrainingError, EngineDeadError, QueueFullError, RemaskError, UnknownNameError
from remask.request.sampling_params import SamplingParams
from remask.server.answers.base import Answer, doc
from remask.server.protocol.base import Body
from remask.server.protocol.conversation import DetokenizeBody, TokenizeBody
from remask.server.protocol.generation import ChatBody, CompletionBody
from remask.server.protocol.messages import MessagesBody
from remask.server.protocol.reads import DecisionsBody, RerankBody, ScoreBody, SystemOneBody
from remask.server.protocol.responses import ResponsesBody

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
CLOSED_BY_CLIENT = 499  # nginx's status, for the access log only
MAX_SHOWN_PATH = 100  # characters of a path in its error
MESSAGES_PATH, SYSTEM_ONE_PATH = "/v1/messages/", "/v1/systemone/"
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
_BODIES: tuple[type[Body], ...] = (
    ChatBody,
    CompletionBody,
    DecisionsBody,
    SystemOneBody,
    ScoreBody,
    RerankBody,
    ResponsesBody,
    MessagesBody,
    TokenizeBody,
    DetokenizeBody,
)
_GROUPS = [field.values.cls for field in declared(SamplingParams).values() if isinstance(field.values, Nested)]
FIELDS = frozenset(name for body in _BODIES for name in (*body.model_fields, *(body.foreign or ()))).union(
    *map(declared, _GROUPS)
)
"""Fields that errors may name: those of bodies, and those of sampling groups, which may be sent in the wrong place."""
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5"},
}


class ErrorDetail(Answer):
    """What went wrong."""

    message: str
    type: str
    param: Annotated[str | None, doc("The field of the body that caused it, where one did.")]
    code: str | None


class Error(Answer):
    """An error, in OpenAI's form. In a stream that has begun it is the last event."""

    error: ErrorDetail


class MessagesErrorDetail(Answer):
    """What went wrong."""

    type: str
    message: str


class MessagesError(Answer):
    """An error, in Anthropic's form. In a stream that has begun it is the last event."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


class SystemOneProblem(Answer):
    """A value that is not allowed. `loc` begins with `body`."""

    loc: list[str]
    msg: str
    type: Literal["value_error"]


class SystemOneFailure(Answer):
    """What went wrong."""

    error_type: str
    message: str


class SystemOneError(Answer):
    """An error, in System One's form: of a body that is not allowed a list, of others an object."""

    detail: list[SystemOneProblem] | SystemOneFailure


class ApiError(RemaskError):
    """An error with an HTTP status. `param` names the field that caused it, or is None."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return ApiError, (self.status, str(self), self.param, self.code)  # the process that reads bodies pickles it


class ClientGoneError(RemaskError):
    """The client closed the connection. Only the access log tells of it."""


def as_api_error(error: RemaskError) -> ApiError:
    """The error with the HTTP status that belongs to its class."""
    if isinstance(error, ApiError):
        return error
    statuses = {QueueFullError: 429, DrainingError: 503, EngineDeadError: 500, ConfigError: 400}
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 500)
    return ApiError(status, str(error), _leading_field(error) if status == 400 else None)


def error_object(error: RemaskError) -> Error:
    """The body of an error in OpenAI's form. A stream that fails sends it as its last event."""
    failure = as_api_error(error)
    kind, code = _CODES.get(failure.status, (_INVALID, None))
    return {"error": {"message": str(failure), "type": kind, "param": failure.param, "code": failure.code or code}}


def messages_error(error: RemaskError, request_id: str | None = None) -> MessagesError:
    """The body of an error in Anthropic's form, for `/v1/messages`."""
    failure = as_api_error(error)
    detail: MessagesErrorDetail = {"type": _MESSAGES_TYPES.get(failure.status, _INVALID), "message": str(failure)}
    return {"type": "error", "error": detail, "request_id": request_id}


def system_one_error(error: RemaskError) -> SystemOneError:
    """The body of an error in System One's form, for `/v1/systemone`."""
    failure = as_api_error(error)
    if failure.status == 400:
        path = failure.param.split(".") if failure.param else []
        return {"detail": [{"loc": ["body", *path], "msg": str(failure), "type": "value_error"}]}
    return {"detail": {"error_type": _MESSAGES_TYPES.get(failure.status, _INVALID), "message": str(failure)}}


def error_response(error: RemaskError, scope: Scope | None = None) -> Response:
    """The response to a request that failed before any byte of its answer was sent.

    Its body has the form of the API whose path is in `scope`, or OpenAI's if there is no `scope`. System One's invalid
    bodies get status 422 instead of 400.
    """
    status = as_api_error(error).status
    headers = _HEADERS.get(status)
    path = "" if scope is None else f"{scope['path'].rstrip('/')}/"
    if path == SYSTEM_ONE_PATH:
        return json_response(system_one_error(error), 422 if status == 400 else status, headers)
    if scope is not None and path.startswith(MESSAGES_PATH):
        return json_response(messages_error(error, scope.get("state", {}).get("request_id")), status, headers)
    return json_response(error_object(error), status, headers)


def json_response(
    value: Mapping[str, Any] | Sequence[Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response in ASCII. Texts of requests may hold lone surrogates, which UTF-8 cannot encode."""
    return Response(json.dumps(value), status, dict(headers or {}), "application/json")


def add_handlers(app: FastAPI) -> None:
    """Install a handler that answers every error in the form of the API of the request's path."""

    async def handle_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, RemaskError)
        if isinstance(error, ClientGoneError):
            return Response(status_code=CLOSED_BY_CLIENT)
        return error_response(error, request.scope)

    async def handle_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(invalid_body(error.errors()), request.scope)

    async def handle_routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(ApiError(error.status_code, _routing_message(error, request)), request.scope)
        response.headers.update(error.headers or {})  # such as `Allow`
        return response

    app.add_exception_handler(RemaskError, handle_ours)
    app.add_exception_handler(RequestValidationError, handle_validation)
    app.add_exception_handler(HTTPException, handle_routing)


def _routing_message(error: HTTPException, request: Request) -> str:
    """Return the message of an error of the router: a 404 suggests a similar path, a 405 lists the path's methods.

    Other errors keep their own message.
    """
    path = request.url.path[:MAX_SHOWN_PATH]
    if error.status_code == 405:
        return f"{path} takes {(error.headers or {}).get('Allow', 'other methods')}, and no {request.method}"
    if error.status_code != 404 or error.detail != "Not Found":
        return str(error.detail)
    paths: Sequence[str] = request.app.state.paths
    # A base URL with one /v1 too many or too few, or with none, is the commonest cause.
    end = _without_version(path)
    similar = [name for name in paths if f"/{name.strip('/')}".endswith(end)]
    if not similar:
        by_end = {_without_version(name): name for name in paths}
        similar = [by_end[name] for name in difflib.get_close_matches(end, by_end, n=1, cutoff=0.8)]
    hint = f"Did you mean {similar[0]}? " if similar else ""
    return f"there is no path {path!r}. {hint}GET /openapi.json lists all of them"


def _without_version(path: str) -> str:
    """`path` behind its last "v1", with a slash before it and none at its end."""
    return f"/{path.strip('/').rpartition('v1/')[2]}"


def invalid_body(problems: Sequence[Mapping[str, Any]], body: Any = None) -> ApiError:
    """Return an error 400 that names the first invalid field and the reason. `problems` are pydantic's of `body`.

    If one of our own errors caused a problem of that field, its message, status, field and code are used.
    """
    first = problems[0]
    field = _field_path(first)
    # A field that allows several types has one problem for each type; an error of our own says more than the others.
    field_problems = [problem for problem in problems if _field_path(problem) == field]
    causes = [problem.get("ctx", {}).get("error") for problem in field_problems]
    cause = next((error for error in causes if isinstance(error, RemaskError)), None)
    if cause is not None:
        return _caused_error(cause, first, is_cause_of_first=causes[0] is cause)
    if field is None and first["type"] in ("missing", "model_attributes_type"):
        return ApiError(400, "the body must be an object, such as '{\"model\": ...}'")
    if first["type"] == "string_unicode":
        message = f"{field or 'the body'}: the text is not valid Unicode. Remove the lone surrogates."
        return ApiError(400, message, field)
    return ApiError(400, _invalid_value(field_problems, body), field)


def _caused_error(cause: RemaskError, problem: Mapping[str, Any], *, is_cause_of_first: bool) -> ApiError:
    """Return the error of a body whose first `problem` is of the field in which our own error `cause` was raised."""
    error = as_api_error(cause)
    field = _field_path(problem)
    if isinstance(cause, UnknownNameError) and cause.kind == "field" and field is not None:
        # An unknown name in an object within the body.
        path = _field_path({"loc": (*problem["loc"], cause.name)})
        return ApiError(error.status, f"{path}: extra fields are not permitted. {error}", path)
    param = error.param if is_cause_of_first else None
    return ApiError(error.status, str(error), param or field, error.code)


_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_type": "a text",
    "too_long": "of at most {max_length} items",
    "too_short": "a list of length at least {min_length}",
}
"""What is allowed where pydantic finds a problem of a type, by the type."""
_LENGTHS = {"string_too_long", "too_long", "too_short"}


def _invalid_value(problems: Sequence[Mapping[str, Any]], body: Any) -> str:
    """Return a sentence that names the innermost invalid value of a field, and what is allowed in its place."""
    # A value of a wrong length has one of the allowed types.
    problems = [problem for problem in problems if problem["type"] in _LENGTHS] or problems
    paths = [_value_path(problem, body) for problem in problems]
    path = max(paths, key=len)  # of the type that the value resembles most
    causes = [problem for problem, other in zip(problems, paths, strict=True) if other == path]
    name = ".".join(path) or "the body"
    if any(problem["type"] == "missing" for problem in causes):
        return f"{name} is missing; send it"
    wanted = [_wanted(problem) for problem in causes]
    if None in wanted:
        return f"{name}: {'; or '.join(dict.fromkeys(str(problem['msg']) for problem in causes))}"
    return f"{name} must be {' or '.join(map(str, dict.fromkeys(wanted)))}, got {shown(causes[0]['input'])}"


def _wanted(problem: Mapping[str, Any]) -> str | None:
    """Return what is allowed in place of an invalid value, to follow "must be", or None if only pydantic says it."""
    words = _WANTED.get(problem["type"])
    return None if words is None else words.format(**problem.get("ctx", {}))


def _value_path(problem: Mapping[str, Any], body: Any) -> list[str]:
    """Return the path of an invalid value in `body`, without the names of types that pydantic's location has."""
    location = problem["loc"][1:]
    if body is None:
        return [str(key) for key in location]
    names_missing = problem["type"] == "missing"
    value = body
    path = []
    for key in location[:-1] if names_missing else location:
        if (isinstance(value, Mapping) and key in value) or (isinstance(value, list) and isinstance(key, int)):
            value = value[key]
            path.append(str(key))
    return [*path, str(location[-1])] if names_missing else path


def _field_path(problem: Mapping[str, Any]) -> str | None:
    """Return the path of the field, such as `messages.0.role`, or None for the body as a whole."""
    path = [str(key) for key in problem["loc"][1:]]  # the first key is `body`, `query` or `path`
    depth = 3 if path[:1] == ["messages"] else 1
    return ".".join(path[:depth]) or None


def _leading_field(error: RemaskError) -> str | None:
    """Return the field, such as `seed` or `uniform.steps`, that the text of a `ConfigError` begins with, or None."""
    if isinstance(error, UnknownNameError):
        group, _, member = error.name.partition(".")
        if error.kind == "field" or (member.isidentifier() and group in FIELDS):
            return error.name
        return error.kind if error.kind in FIELDS else None
    path = re.split(r"[ =:\[]", str(error), maxsplit=1)[0]
    field, _, member = path.partition(".")
    if field not in FIELDS:
        return None
    return path if member in FIELDS else field
