"""Calling an application in this process: parts come as they are sent, and leaving is told."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from remask.deploy.asgi import Call, Head, respond
from tests.waiting import LONGEST_S

CALL = Call("POST", "/p", b"a=1", ((b"x", b"y"),), b"body")


def test_parts_come_as_they_are_sent() -> None:
    seen: list[Any] = []
    order: list[str] = []
    was_read = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([scope["method"], scope["path"], scope["query_string"], scope["headers"], await receive()])
        await send({"type": "http.response.start", "status": 201, "headers": [(b"k", b"v")]})
        for part in (b"one", b"two"):
            order.append(f"sent {part.decode()}")
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.wait_for(was_read.wait(), LONGEST_S)
            was_read.clear()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def read() -> list[Any]:
        parts = []
        async for part in respond(app, CALL):
            order.append(f"read {part!r}")
            parts.append(part)
            if isinstance(part, bytes):
                was_read.set()
        return parts

    assert asyncio.run(read()) == [Head(201, ((b"k", b"v"),)), b"one", b"two"]
    message = {"type": "http.request", "body": b"body", "more_body": False}
    assert seen == ["POST", "/p", b"a=1", [(b"x", b"y")], message]
    assert order.index("read b'one'") < order.index("sent two")


def test_an_application_hears_that_its_reader_has_gone() -> None:
    heard: list[str] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        heard.append((await receive())["type"])

    async def leave() -> None:
        parts: AsyncGenerator[Any, None] = respond(app, CALL)
        assert await anext(parts) == Head(200, ())
        await parts.aclose()

    asyncio.run(leave())
    assert heard == ["http.disconnect"]


def test_what_the_application_raises_is_raised() -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise RuntimeError("broken")

    async def read() -> None:
        async for _ in respond(app, CALL):
            pass

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(read())
