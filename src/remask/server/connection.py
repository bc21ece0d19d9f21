"""One HTTP connection: limits on what a client may make the server wait for and hold, in front of uvicorn's protocol.

Only what asyncio, ASGI and httptools document is used: `Connection` is the class that `uvicorn.Config(http=...)` takes.
It passes bytes on to uvicorn's protocol, which gets a transport of ours, and follows the framing of requests with a
parser of its own. `Exchanges` is ASGI middleware that tells a connection of the answers to its requests.
"""

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from remask.server.config import ServerLimits
from remask.server.errors import CLOSED_BY_CLIENT, ApiError, error_response

MAX_HEAD_BYTES = 64 << 10  # of a request's line and headers, and of the trailers behind its body
LINGER_S = 10.0  # an answer that was given early reaches the client while it still sends, for this long
LINGER_BYTES = 64 << 20  # and for so many bytes
FIRST_PROBE_S, LAST_PROBE_S = 0.1, 5.0  # seconds until a silent client is probed first, and most between two probes
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATE = "connection"  # the key of a request's connection in its scope's state, until `Exchanges` takes it out
_DISCONNECT = {"type": "http.disconnect"}


class Connection(asyncio.Protocol):
    """A connection that no client can hold open without making progress.

    - A request's line and headers must be complete in time, and may be `MAX_HEAD_BYTES` long.
    - An answer that is given before the whole body has come (401, 413) is not lost: the rest of the body is read and
      discarded for a while. Closing at once would reset the connection, and the client would not see the answer.
    - A client that closes only its sending side gets its answers. Whether it still listens is found out by interim
      responses, and within a stream by the `comment` in its scope's state; clients discard both.
    """

    limits: ClassVar[ServerLimits]
    connections: ClassVar[set["Connection"]]  # those of a server that are open

    transport: asyncio.Transport
    lost: asyncio.Future[None]  # done once the client is gone

    def __init__(self, *, app_state: dict[str, Any], **kwargs: Any) -> None:
        self._uvicorn = HttpToolsProtocol(app_state={**app_state, _STATE: self}, **kwargs)
        self._parser = httptools.HttpRequestParser(self)
        # As uvicorn's parser, so that both find the same requests.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.client: tuple[str, int] | None = None
        self.exchange: Exchange | None = None  # the last one that was begun
        self.unread = 0  # bytes since the last complete head or piece of a body
        self.unanswered = 0  # requests whose heads have come
        self.ends = False  # the connection closes once the rest of the body is discarded
        self.probe_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None
        self._discarded = 0  # bytes that came after the answer to their own request
        self._in_body = False
        self._half_closed = False
        self._broken = False  # what came is not HTTP

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock, or refuse the connection where there are too many."""
        self.transport = cast("asyncio.Transport", transport)
        self.client = transport.get_extra_info("peername")
        self._loop = asyncio.get_running_loop()
        self.lost = self._loop.create_future()
        self.connections.add(self)
        self._uvicorn.connection_made(cast("asyncio.Transport", _Transport(self)))
        if len(self.connections) > self.limits.max_connections:
            most = self.limits.max_connections
            self._refuse(
                503,
                f"{most} connections are open, the most that this server takes; try again later",
                code="too_many_connections",
            )
            return
        self._await_head(self.limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks, and tell the request that is being answered."""
        for timer in (self._head_timer, self._linger_timer, self.probe_timer, self._probing):
            if timer is not None:
                timer.cancel()
        self.connections.discard(self)
        self.lost.set_result(None)
        self._uvicorn.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on what has come. Refuse heads and trailers that are too long."""
        if self.transport.is_closing():
            return
        if self._linger_timer is not None:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.transport.close()
                return
        self.unread += len(data)
        self._follow(data)
        if self.unread > MAX_HEAD_BYTES + len(data) and not self.transport.is_closing():
            self._refuse(431, f"the request's line and headers exceed {MAX_HEAD_BYTES} bytes")
        if not (self.ends or self.transport.is_closing()):
            self._uvicorn.data_received(data)

    def eof_received(self) -> bool:
        """The client sends no more. Returns whether the connection stays open for the answers."""
        if not self.unanswered or self._in_body or self.unread:
            return False
        self._half_closed = True
        self._probe(FIRST_PROBE_S)
        return True

    def pause_writing(self) -> None:
        """The client does not read as fast as answers are written."""
        self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        """The client has read most of what was written."""
        self._uvicorn.resume_writing()

    def on_headers_complete(self) -> None:
        """Stop the clock of the head. The parser calls this, and the next two."""
        self.unread, self._in_body = 0, True
        self.unanswered += 1
        if self._head_timer is not None:
            self._head_timer.cancel()

    def on_body(self, body: bytes) -> None:  # noqa: ARG002 - httptools' signature
        """A piece of the body has come."""
        self.unread = 0

    def on_message_complete(self) -> None:
        """The whole request has come."""
        self.unread, self._in_body = 0, False
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
            if self.ends:
                self.transport.close()
            else:  # its time for the next head may have passed while it sent
                self._await_head(self.limits.keep_alive_timeout + self.limits.header_timeout)

    def answered(self) -> None:
        """A request has its whole answer. Where the request has not come as a whole, discard the rest of it."""
        self.unanswered -= 1
        if self.transport.is_closing():
            return
        if not self.unanswered:
            if self._half_closed:
                self.transport.close()
                return
            if self._in_body:
                self._linger()
        self._await_head(self.limits.keep_alive_timeout + self.limits.header_timeout)

    def close_after_answer(self) -> None:
        """End the connection once its client can have read the answer. A second call ends it at once."""
        if self._linger_timer is not None or not self._in_body:
            self.transport.close()
            return
        if self.transport.is_closing():
            return
        self.ends = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger()

    def _follow(self, data: bytes) -> None:
        """Find where requests begin and end. uvicorn's parser answers what is malformed."""
        if self._broken:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # there is nothing to upgrade to; uvicorn takes it for an ordinary request too
        except httptools.HttpParserError:
            self._broken, self._in_body = True, False

    def _await_head(self, seconds: float) -> None:
        """Give the client so many seconds to send its next request's head."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self._loop.call_later(seconds, self._no_head)

    def _no_head(self) -> None:
        if self.unanswered or self._linger_timer is not None:  # other clocks run for these
            return
        if self.unread:
            self._refuse(408, f"the request's headers were not complete within {self.limits.header_timeout:g} s")
        else:
            self.transport.close()

    def _linger(self) -> None:
        if self._linger_timer is None:
            self._discarded = 0
            self._linger_timer = self._loop.call_later(LINGER_S, self.transport.close)
            self.transport.resume_reading()

    def _probe(self, wait: float) -> None:
        """Find out whether a client that sends no more still listens: one that does not resets the connection."""
        if self.transport.is_closing():
            return
        exchange = self.exchange
        if exchange is not None and not exchange.complete:
            if not exchange.started:
                if exchange.scope["http_version"] == "1.1":
                    self.transport.write(_CONTINUE)
            # What waits to be written is a probe too, and behind it a comment might come after the stream's end.
            elif not self.transport.get_write_buffer_size():
                self._probing = self._loop.create_task(exchange.comment())
        self.probe_timer = self._loop.call_later(wait, self._probe, min(2 * wait, LAST_PROBE_S))

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer what is no whole request, and close the connection."""
        body = bytes(error_response(ApiError(status, message, code=code)).body)
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write((line + head).encode("ascii") + body)
        self.transport.close()


class _Transport:
    """The transport as uvicorn sees it: closing it waits until the client can have read the answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._transport = connection, connection.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether uvicorn has closed the connection, or it is lost."""
        return self._connection.ends or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write, unless nobody listens any more. asyncio would warn."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection gently."""
        self._connection.close_after_answer()


class Exchange:
    """One request and its answer."""

    def __init__(self, connection: Connection, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.started = self.complete = False
        self._whole = False  # the application has the request's whole body
        self._connection, self._receive, self._send = connection, receive, send

    async def receive(self) -> Message:
        """Pass on what the client sends, and that it has gone.

        Where it has sent several requests at once, uvicorn tells only the last one; the others are whole by then.
        """
        if not self._whole:
            message = await self._receive()
            self._whole = not message.get("more_body", False)
            return message
        lost = self._connection.lost
        if lost.done():
            return dict(_DISCONNECT)
        reading = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else dict(_DISCONNECT)
        finally:
            reading.cancel()

    async def send(self, message: Message) -> None:
        """Pass an answer on, and tell the connection once it is complete."""
        await self._send(message)
        self.started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not self.complete:
            self.complete = True
            self._connection.answered()

    async def comment(self) -> None:
        """Send what clients discard, within a stream that has such a thing."""
        comment = self.scope["state"].get("comment")
        if comment is not None and not self.complete:
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    async def finish(self) -> None:
        """End an answer that the client did not wait for; uvicorn would log a fault of the application."""
        if self._connection.lost.done():
            if not self.started:
                await self._send({"type": "http.response.start", "status": CLOSED_BY_CLIENT, "headers": []})
            await self._send({"type": "http.response.body", "body": b""})
        self._connection.answered()


class Exchanges:
    """ASGI middleware, the outermost one: tells connections of the requests that are being answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        connection = scope.get("state", {}).pop(_STATE, None) if scope["type"] == "http" else None
        if connection is None:
            await self._app(scope, receive, send)
            return
        exchange = connection.exchange = Exchange(connection, scope, receive, send)
        await self._app(scope, exchange.receive, exchange.send)
        if not exchange.complete:
            await exchange.finish()


def connection_class(limits: ServerLimits) -> type[Connection]:
    """Return a class of connections with these limits, which uvicorn makes one of for each client."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "connections": set()})
