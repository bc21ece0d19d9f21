"""Calls an ASGI application in this process and streams its response."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeAlias

from starlette.types import ASGIApp, Message, Scope

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

REPLICA_HEADER = b"x-remask-replica"
"""In a response it names the replica that answered; in a request, the replica that must answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request as plain data."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None = None

    def header(self, name: bytes) -> str | None:
        """Return the value of the first header with this name in lower case, or None."""
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == name), None)


@dataclass(frozen=True, slots=True)
class Head:
    """The status and headers of a response, its first part."""

    status: int
    headers: Headers


async def respond(app: ASGIApp, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """Yield the response of `app` to `call`: its `Head`, then the chunks of its body.

    If the reader stops early, the application gets an `http.disconnect`, and its end is awaited. Exceptions of the
    application are raised here.
    """
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": list(call.headers),
        "client": call.client,
        "server": None,
    }
    parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
    disconnected = asyncio.Event()
    body_sent = False

    async def receive() -> Message:
        nonlocal body_sent
        if not body_sent:
            body_sent = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            parts.put_nowait(Head(message["status"], tuple((bytes(k), bytes(v)) for k, v in message["headers"])))
        elif message.get("body"):
            parts.put_nowait(message["body"])

    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (part := await parts.get()) is not None:
            yield part
    finally:
        disconnected.set()
        await task
