"""Responses that end when the client goes away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from remask.errors import RemaskError
from remask.server.errors import error_response

T = TypeVar("T")

CLOSED_BY_CLIENT = 499  # nginx' status, for the log: nobody is there to read it


class ClientGoneError(RemaskError):
    """The client closed the connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, or `ClientGoneError` as soon as the client has gone; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed the connection")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The status is sent with the first event, so that what fails before has a status of its own.

    `finish` is called once at the end, whatever it was.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], finish: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._finish = events, finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client goes."""
        try:
            await unless_gone(receive, self._pump(scope, receive, send))
        except ClientGoneError:
            pass
        finally:
            self._finish()

    async def _pump(self, scope: Scope, receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
        started = False
        try:
            async for event in self._events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except RemaskError as error:
            if started:
                raise
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
