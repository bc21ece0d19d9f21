"""Reading a request's body: its values counted, its JSON parsed, its fields checked. Small ones are read in place.

A large body takes up to half a second of one long operation that no other thread can interrupt, so a process of its
own reads it (`BodyReaders`).
"""

import json
import pickle
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from itertools import islice
from pkgutil import resolve_name
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from remask.checks.values import parsed_json
from remask.machine.helper import Answers, HelperError, Helpers
from remask.server.errors import ApiError, invalid_body
from remask.server.texts import Turns

SMALL = 1 << 14  # bytes of a body that is read in some milliseconds, whatever it holds
MAX_SECONDS = 10.0  # processor time of one body; the largest by default take less than one
MAX_BYTES = 2 << 30  # memory of the process
# Texts, brackets that open, and what stands between marks. Possessive, so that no text is read twice.
_ITEM = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[^\s\[\]{},:"]++', re.DOTALL)


def items_in(text: str, most: int) -> int:
    """How many values and names a JSON text holds; the counting ends beyond `most`. Nothing is parsed."""
    if len(text) <= most:
        return 0  # each takes a character at least
    return sum(1 for _ in islice(_ITEM.finditer(text), most + 1))


def is_json(kind: str) -> bool:
    """Whether a `Content-Type` says JSON: in any case, and with any parameters."""
    message = Message()
    message["content-type"] = kind
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def read_body(model: type[BaseModel], content: bytes, most: int) -> BaseModel:
    """The `model` of the JSON text `content`, which may hold `most` values and names. Raises `ApiError`."""
    try:
        text = content.decode(json.detect_encoding(content), "surrogatepass")
        if items_in(text, most) > most:
            raise ApiError(
                413,
                f"the body holds more than {most} values and names, the most that this server accepts "
                "(max_body_items); send fewer in one request",
            )
        value = parsed_json(text) if text else None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from error
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise invalid_body([{**problem, "loc": ("body", *problem["loc"])} for problem in problems]) from error


class BodyReaders:
    """A process that reads large bodies, one at a time; clients take turns. It is started when it is first needed.

    Args:
        most: values and names that a body may hold.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._helpers = Helpers(
            "remask.server.bodies:reader", pickle.dumps(most), seconds=MAX_SECONDS, memory=MAX_BYTES, background=True
        )
        self._thread, self._turns = ThreadPoolExecutor(1, thread_name_prefix="remask-bodies"), Turns(1)

    async def read(self, owner: str, model: type[BaseModel], content: bytes) -> BaseModel:
        """As `read_body`, away from the event loop. Raises `ApiError`."""
        return await self._turns.run(owner, self._thread, self._ask, model, content)

    def close(self) -> None:
        """End the thread, and then the process."""
        self._thread.shutdown()
        self._helpers.close()

    def _ask(self, model: type[BaseModel], content: bytes) -> BaseModel:
        try:
            answer = self._helpers.ask(pickle.dumps((f"{model.__module__}:{model.__name__}", content)))
        except HelperError as error:
            raise ApiError(413, f"the body cannot be read: {error}; send less in one request") from error
        found = pickle.loads(answer)  # of our own process
        if isinstance(found, ApiError):
            raise found
        assert isinstance(found, BaseModel)
        return found


def reader(settings: bytes) -> Answers:
    """What reads bodies: a task of helpers. All content is pickled: how many values a body may hold; then each body.

    A body comes with the name of its model. It is answered by what was read, or by the `ApiError` that refuses it.
    """
    most = pickle.loads(settings)

    def read(question: bytes) -> bytes:
        name, content = pickle.loads(question)
        try:
            return pickle.dumps(read_body(resolve_name(name), content, most))
        except ApiError as refused:
            return pickle.dumps(refused)

    return read


class ReadRequest(Request):
    """A request whose body has been read."""

    def __init__(self, request: Request, content: bytes, read: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._content, self._read = content, read

    async def body(self) -> bytes:
        """The bytes that came."""
        return self._content

    async def json(self) -> Any:
        """The body, which FastAPI's check passes on as it is."""
        return self._read


class BodyRoute(APIRoute):
    """A route whose bodies are read here, large ones in another process; FastAPI gets what was read.

    `app.state.service` is the server's `Service`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of a request."""
        handle = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation
        if model is None:
            return handle

        async def read(request: Request) -> Response:
            if not is_json(request.headers.get("content-type", "")):
                raise ApiError(400, "the body must be JSON: send the header 'Content-Type: application/json'")
            content, service = await request.body(), request.app.state.service
            if len(content) <= SMALL:
                body = read_body(model, content, service.bodies.most)
            else:
                body = await service.read_body(request, model, content)
            return await handle(ReadRequest(request, content, body))

        return read
