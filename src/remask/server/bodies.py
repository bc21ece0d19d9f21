"""Reading a request's body: its values counted, its JSON parsed, its fields checked. Small ones are read in place.

A large body takes up to half a second of one long operation that no other thread can interrupt, so a process of its
own reads it (`BodyReaders`).
"""

import asyncio
import json
import pickle
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

from remask.server.errors import ApiError, invalid_body
from remask.server.texts import Turns
from remask.text.workers import FrameWorkers, WorkerEndedError

SMALL = 1 << 16  # bytes of a body that is read in some milliseconds
MAX_SECONDS = 10.0  # processor time of one body; the largest by default take less than one
MAX_BYTES = 2 << 30  # memory of the process
READ, REFUSED = b"B", b"R"
# Texts, brackets that open, and what stands between marks. Possessive, so that no text is read twice.
_ITEM = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[^\s\[\]{},:"]++', re.DOTALL)


def items_in(body: bytes, most: int) -> int:
    """How many values and names a JSON text holds; the counting ends beyond `most`. Nothing is parsed."""
    if len(body) <= most:
        return 0  # each takes a byte at least
    if b"\0" in body:  # UTF-16 or UTF-32, in which a text's end is not seen byte by byte: all marks count
        return sum(map(body.count, (b",", b"[", b"{")))
    return sum(1 for _ in islice(_ITEM.finditer(body), most + 1))


def check_items(content: bytes, most: int) -> None:
    """Raise an `ApiError` where a body holds more than `most` values and names."""
    if items_in(content, most) > most:
        raise ApiError(
            413,
            f"the body holds more than {most} values and names, the most that this server accepts (max_body_items); "
            "send fewer in one request",
        )


def read_body(model: type[BaseModel], content: bytes, most: int) -> BaseModel:
    """The `model` of the JSON text `content`. Raises `ApiError`, as FastAPI and `errors.add_handlers` do together."""
    check_items(content, most)
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from error
    try:
        read: BaseModel = TypeAdapter(model).validate_python(value, from_attributes=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise invalid_body([{**problem, "loc": ("body", *problem["loc"])} for problem in problems]) from error
    return read


class BodyReaders:
    """A process that reads large bodies, one at a time; clients take turns. It is started when it is first needed.

    Args:
        most: values and names that a body may hold.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        job = pickle.dumps({"seconds": MAX_SECONDS, "bytes": MAX_BYTES, "most": most})
        self._workers = FrameWorkers([sys.executable, "-m", "remask.server.body_worker"], job)
        self._thread, self._turns = ThreadPoolExecutor(1, thread_name_prefix="remask-bodies"), Turns(1)

    async def read(self, owner: str, model: type[BaseModel], content: bytes) -> BaseModel:
        """As `read_body`, away from the event loop. Raises `ApiError`."""
        await self._turns.acquire(owner)
        loop = asyncio.get_running_loop()
        work = self._thread.submit(self._ask, model, content)
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._turns.release))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """End the thread, and then the process."""
        self._thread.shutdown()
        self._workers.close()

    def _ask(self, model: type[BaseModel], content: bytes) -> BaseModel:
        try:
            kind, answer = self._workers.ask(pickle.dumps((f"{model.__module__}:{model.__name__}", content)))
        except WorkerEndedError as ended:
            why = f"reading it took more than {MAX_SECONDS:g} s" if ended.status == -signal.SIGPROF else str(ended)
            raise ApiError(413, f"the body cannot be read: {why}; send less in one request") from ended
        found = pickle.loads(answer)  # of our own process
        if kind == REFUSED:
            raise ApiError(**found)
        assert isinstance(found, BaseModel)
        return found


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
    """A route whose bodies are counted before they are parsed, and read in another process where they are large.

    `app.state.service` is the server's `Service`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of a request."""
        handle = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation
        if model is None:
            return handle

        async def read(request: Request) -> Response:
            content, service = await request.body(), request.app.state.service
            if len(content) <= SMALL:
                check_items(content, service.bodies.most)
            elif "json" in request.headers.get("content-type", ""):
                request = ReadRequest(request, content, await service.read_body(request, model, content))
            return await handle(request)

        return read


def error_fields(error: ApiError) -> Mapping[str, Any]:
    """What an equal error is made of."""
    return {"status": error.status, "message": str(error), "param": error.param, "code": error.code}
