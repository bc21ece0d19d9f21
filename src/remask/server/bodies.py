"""Reads bodies of requests: counts their values, parses their JSON and checks their fields.

Small bodies are read in place. A large one takes up to half a second of one long operation that no other thread can
interrupt, so a process of its own reads it (`BodyReaders`). `TextWorkers` are threads that render and tokenize texts.
"""

import asyncio
import json
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from itertools import islice
from pkgutil import resolve_name
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from remask.checks.values import parse_json
from remask.machine.helper import Answers, HelperError, Helpers
from remask.server.errors import ApiError, invalid_body

T = TypeVar("T")

SHORT_CHARS = 16_384  # characters that are tokenized in some milliseconds
LONG_CHARS = SHORT_CHARS + 1  # the size of other work that takes as long as the shortest of long texts
CHARS_PER_TEXT = 64  # the work on a text of any length, in characters, besides its own
SMALL_BYTES = 1 << 14  # of a body that is read in some milliseconds, whatever it holds
MAX_SECONDS = 10.0  # processor time of one body; the largest by default take less than one
MAX_BYTES = 2 << 30  # memory of the process
# A string, an opening bracket, or a bare word. Possessive, so that no text is scanned twice.
_ITEM = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[^\s\[\]{},:"]++', re.DOTALL)


def count_items(text: str, limit: int) -> int:
    """Count the values and names in a JSON text, at most `limit` + 1, by scanning it.

    Returns 0 if the text is too short for more than `limit`.
    """
    if len(text) <= limit:
        return 0  # every item has at least one character
    return sum(1 for _ in islice(_ITEM.finditer(text), limit + 1))


def is_json(content_type: str) -> bool:
    """Whether a `Content-Type` header says JSON, in any case and with any parameters."""
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def read_body(model: type[BaseModel], content: bytes, max_items: int) -> BaseModel:
    """Parse and check the JSON text `content`, which may hold `max_items` values and names.

    Raises `ApiError`: a 413 on more of them, a 400 on what is not JSON or not a valid `model`.
    """
    try:
        text = content.decode(json.detect_encoding(content), "surrogatepass")
        if count_items(text, max_items) > max_items:
            raise ApiError(
                413,
                f"the body holds more than {max_items} values and names, the most that this server accepts "
                "(max_body_items); send fewer in one request",
            )
        value = parse_json(text) if text else None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from error
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise invalid_body([{**problem, "loc": ("body", *problem["loc"])} for problem in problems], value) from error


class FairSemaphore:
    """A semaphore of `permits`. Owners that wait get one permit each in turn (round robin), however many they wait for.

    Not thread-safe: for one event loop.
    """

    def __init__(self, permits: int) -> None:
        self._permits = permits
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next owner is the first one

    async def acquire(self, owner: str) -> None:
        """Wait for a permit."""
        if self._permits:
            self._permits -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it got its permit in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Give a permit to the next owner that waits, or back."""
        while self._waiting:
            owner, waiters = self._waiting.popitem(last=False)
            while waiters and waiters[0].done():  # cancelled
                waiters.popleft()
            if waiters:
                waiters.popleft().set_result(None)
                if waiters:
                    self._waiting[owner] = waiters
                return
        self._permits += 1

    async def run(self, owner: str, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns on a thread of `pool`. A permit is held until `call` ends, also if cancelled."""
        await self.acquire(owner)
        loop = asyncio.get_running_loop()
        work = pool.submit(call, *args)
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self.release))
        return await asyncio.wrap_future(work)


class TextWorkers:
    """Threads that work on texts, at least two. Tokenizers release the interpreter's lock while they work.

    Long texts never hold all threads, so short ones do not wait for them. Long ones of several owners take turns.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="remask-text")
        self._long = FairSemaphore(threads - 1)

    async def run(self, owner: str, size: int, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns, and raise what it raises. `size` is about how many characters it works on.

        If the caller is cancelled, a call that has not begun never runs, and one that has begun runs to its end.
        """
        if size <= SHORT_CHARS:
            return await asyncio.wrap_future(self._pool.submit(call, *args))
        return await self._long.run(owner, self._pool, call, *args)

    def close(self) -> None:
        """Stop the threads after all pending calls."""
        self._pool.shutdown()


class BodyReaders:
    """A process that reads large bodies, one at a time; clients take turns. It starts with the first body.

    Args:
        max_items: values and names that a body may hold.
    """

    def __init__(self, max_items: int) -> None:
        self.max_items = max_items
        self._helpers = Helpers(
            "remask.server.bodies:reader",
            pickle.dumps(max_items),
            seconds=MAX_SECONDS,
            memory=MAX_BYTES,
            background=True,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remask-bodies")
        self._semaphore = FairSemaphore(1)

    async def read(self, owner: str, model: type[BaseModel], content: bytes) -> BaseModel:
        """Read a body as `read_body` does, in the process. Raises `ApiError`, also on the limits of the process."""
        return await self._semaphore.run(owner, self._thread, self._read, model, content)

    def close(self) -> None:
        """Stop the thread, and then the process."""
        self._thread.shutdown()
        self._helpers.close()

    def _read(self, model: type[BaseModel], content: bytes) -> BaseModel:
        try:
            answer = self._helpers.ask(pickle.dumps((f"{model.__module__}:{model.__name__}", content)))
        except HelperError as error:
            raise ApiError(413, f"the body cannot be read: {error}; send less in one request") from error
        body = pickle.loads(answer)  # trusted: it comes from our own process
        if isinstance(body, ApiError):
            raise body
        assert isinstance(body, BaseModel)
        return body


def reader(settings: bytes) -> Answers:
    """The task of the process that reads bodies. `settings` are the pickled number of values that a body may hold.

    A question is the pickled name of a model and the content of a body; the answer is the pickled body, or the
    `ApiError` that refuses it.
    """
    max_items = pickle.loads(settings)

    def read(question: bytes) -> bytes:
        name, content = pickle.loads(question)
        try:
            return pickle.dumps(read_body(resolve_name(name), content, max_items))
        except ApiError as error:
            return pickle.dumps(error)

    return read


class ReadRequest(Request):
    """A request whose body has been read and checked."""

    def __init__(self, request: Request, content: bytes, parsed: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._content = content
        self._parsed = parsed

    async def body(self) -> bytes:
        """The bytes of the body."""
        return self._content

    async def json(self) -> Any:
        """The checked body, which FastAPI's own check returns unchanged."""
        return self._parsed


class BodyRoute(APIRoute):
    """A route that reads bodies itself instead of FastAPI, large ones in another process.

    `app.state.service` is the server's `Service`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """A handler that reads the body, if the endpoint has one, and calls FastAPI's. It raises `ApiError`."""
        handle = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation
        if model is None:
            return handle

        async def read_and_handle(request: Request) -> Response:
            if not is_json(request.headers.get("content-type", "")):
                raise ApiError(400, "the body must be JSON: send the header 'Content-Type: application/json'")
            content = await request.body()
            service = request.app.state.service
            if len(content) <= SMALL_BYTES:
                body = read_body(model, content, service.bodies.max_items)
            else:
                body = await service.read_body(request, model, content)
            return await handle(ReadRequest(request, content, body))

        return read_and_handle
