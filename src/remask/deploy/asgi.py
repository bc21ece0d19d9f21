"""Calling an ASGI application in this process, with its answer as a stream of parts."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeAlias

from starlette.types import ASGIApp, Message, Scope

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

REPLICA_HEADER = b"x-remask-replica"
"""Tells in an answer which replica gave it, and in a request which one is asked."""


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
        """The first header of that name, which is in lower case; None without one."""
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == name), None)


@dataclass(frozen=True, slots=True)
class Head:
    """The first part of an answer."""

    status: int
    headers: Headers


async def respond(app: ASGIApp, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """The answer of `app` to `call`: its head, then its body as it comes.

    Whoever stops reading has gone: the application is told that the client has disconnected, and ends on its own.
    Raises what the application raises.
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
    gone = asyncio.Event()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await gone.wait()
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
        gone.set()
        await task
