"""Responses that end when the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from remask.errors import RemaskError
from remask.server.errors import error_response

T = TypeVar("T")

CLOSED_BY_CLIENT = 499  # nginx's status, for the access log only


class ClientGoneError(RemaskError):
    """The client closed the connection."""


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns. If the client disconnects first, cancel `work` and raise `ClientGoneError`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed the connection")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The status goes out with the first event, so an earlier failure can have its own status.

    `finish` is called once at the end, after success and after failure.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], finish: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._finish = events, finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client disconnects."""
        scope["state"]["comment"] = b":\n\n"  # may stand between two events
        try:
            await run_while_connected(receive, self._pump(scope, receive, send))
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
            await error_response(error, scope)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
