"""Bodies of requests: their values counted, their JSON parsed, their fields checked; and what long ones run on.

Small bodies are read in place. A large one takes up to half a second of one long operation that no other thread can
interrupt, so a process of its own reads it (`BodyReaders`). `TextWorkers` render and tokenize texts.
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

SHORT = 16_384  # characters that are tokenized in some milliseconds
LONG = SHORT + 1  # what takes as long as a long text counts as many characters
ITEM = 64  # characters that a further text counts as, however short it is
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
        value = parse_json(text) if text else None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from error
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise invalid_body([{**problem, "loc": ("body", *problem["loc"])} for problem in problems]) from error


class Turns:
    """So many places, for which owners wait in turn: each gets one before another gets its next, whoever asks most."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # who is next stands first

    async def acquire(self, owner: str) -> None:
        """Wait for a place."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got its place in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Give a place to the next owner."""
        while self._waiting:
            owner, line = self._waiting.popitem(last=False)
            while line and line[0].done():  # who has left
                line.popleft()
            if line:
                line.popleft().set_result(None)
                if line:
                    self._waiting[owner] = line
                return
        self._free += 1

    async def run(self, owner: str, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns on a thread of `pool`, which holds a place until it has ended."""
        await self.acquire(owner)
        loop = asyncio.get_running_loop()
        work = pool.submit(call, *args)
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self.release))
        return await asyncio.wrap_future(work)


class TextWorkers:
    """`threads` threads, two at least, for texts: tokenizers release the interpreter's lock while they work.

    Long texts never hold all of them, so short ones do not wait for long ones. Long ones of several owners take turns.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="remask-text")
        self._long = Turns(threads - 1)

    async def run(self, owner: str, size: int, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns, and raise what it raises. `size` is about how many characters it works on.

        A call whose caller is cancelled does not begin; once begun it runs to its end, and holds its thread so long.
        """
        if size <= SHORT:
            return await asyncio.wrap_future(self._pool.submit(call, *args))
        return await self._long.run(owner, self._pool, call, *args)

    def close(self) -> None:
        """End the threads once they have done what they were given."""
        self._pool.shutdown()


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
        body = pickle.loads(answer)  # of our own process
        if isinstance(body, ApiError):
            raise body
        assert isinstance(body, BaseModel)
        return body


def reader(settings: bytes) -> Answers:
    """What reads bodies: a task of helpers. All content is pickled: how many values a body may hold; then each body.

    A body comes with the name of its model. The answer is what was read, or the `ApiError` that refuses it.
    """
    most = pickle.loads(settings)

    def read(question: bytes) -> bytes:
        name, content = pickle.loads(question)
        try:
            return pickle.dumps(read_body(resolve_name(name), content, most))
        except ApiError as error:
            return pickle.dumps(error)

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
