"""One HTTP connection: limits on what a client may make the server wait for and hold, in front of uvicorn's protocol.

`Connection` is the class that `uvicorn.Config(http=...)` takes. It passes bytes on to uvicorn's protocol, which gets a
transport of ours, and follows the framing of requests with a parser of its own. `Exchanges` is ASGI middleware that
tells a connection about the answers to its requests. Only documented parts of asyncio, ASGI and httptools are used.
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
LINGER_S = 10.0  # seconds in which the rest of a body is discarded after its answer
LINGER_BYTES = 64 << 20  # bytes of it that are discarded
FIRST_PROBE_S, LAST_PROBE_S = 0.1, 5.0  # seconds until a silent client is first probed, and at most between two probes
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATE = "connection"  # the key of a request's connection in its scope's state, until `Exchanges` takes it out
_DISCONNECT = {"type": "http.disconnect"}


class Connection(asyncio.Protocol):
    """A connection that no client can hold open without making progress.

    - A request's line and headers must be complete in time, and may be `MAX_HEAD_BYTES` long.
    - An answer that is given before the whole body has come (401, 413) is not lost: the rest of the body is read and
      discarded for a while. Closing at once would reset the connection, and the client would not see the answer.
    - A client that closes only its sending side gets its answers. Whether it still listens is probed by interim
      responses, and within a stream by the `comment` in its scope's state; clients discard both.
    """

    limits: ClassVar[ServerLimits]
    connections: ClassVar[set["Connection"]]  # the server's open ones

    transport: asyncio.Transport
    lost: asyncio.Future[None]  # done once the connection is lost

    def __init__(self, *, app_state: dict[str, Any], **kwargs: Any) -> None:
        self._uvicorn = HttpToolsProtocol(app_state={**app_state, _STATE: self}, **kwargs)
        self._parser = httptools.HttpRequestParser(self)
        # The same leniency as uvicorn's parser, so that both find the same requests.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.client: tuple[str, int] | None = None
        self.exchange: Exchange | None = None  # the latest one
        self.head_bytes = 0  # received since the last complete head or part of a body
        self.unanswered = 0  # requests whose heads were received
        self.is_ending = False  # the connection closes once the rest of the body is discarded
        self.probe_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._probe_task: asyncio.Task[None] | None = None
        self._discarded_bytes = 0  # received after the answer to their own request
        self._in_body = False
        self._is_half_closed = False
        self._is_malformed = False  # the client has sent something else than HTTP

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout of the first head. Refuses the connection with a 503 if there are too many."""
        self.transport = cast("asyncio.Transport", transport)
        self.client = transport.get_extra_info("peername")
        self._loop = asyncio.get_running_loop()
        self.lost = self._loop.create_future()
        self.connections.add(self)
        self._uvicorn.connection_made(cast("asyncio.Transport", _Transport(self)))
        if len(self.connections) > self.limits.max_connections:
            self._refuse(
                503,
                f"{self.limits.max_connections} connections are open, the most that this server takes; try again later",
                code="too_many_connections",
            )
            return
        self._await_head(self.limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and tell the request that is being answered."""
        for timer in (self._head_timer, self._linger_timer, self.probe_timer, self._probe_task):
            if timer is not None:
                timer.cancel()
        self.connections.discard(self)
        self.lost.set_result(None)
        self._uvicorn.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass `data` on to uvicorn. Refuses heads and trailers that are too long with a 431."""
        if self.transport.is_closing():
            return
        if self._linger_timer is not None:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES:
                self.transport.close()
                return
        self.head_bytes += len(data)
        self._follow_framing(data)
        if self.head_bytes > MAX_HEAD_BYTES + len(data) and not self.transport.is_closing():
            self._refuse(431, f"the request's line and headers exceed {MAX_HEAD_BYTES} bytes")
        if not (self.is_ending or self.transport.is_closing()):
            self._uvicorn.data_received(data)

    def eof_received(self) -> bool:
        """Handle the end of what the client sends. Returns whether the connection stays open for the answers."""
        if not self.unanswered or self._in_body or self.head_bytes:
            return False
        self._is_half_closed = True
        self._probe(FIRST_PROBE_S)
        return True

    def pause_writing(self) -> None:
        """Called by asyncio when the client reads slower than answers are written."""
        self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        """Called by asyncio when the client has read most of what was written."""
        self._uvicorn.resume_writing()

    def on_headers_complete(self) -> None:
        """Called by the parser at the end of a request's head: stops its timeout."""
        self.head_bytes = 0
        self._in_body = True
        self.unanswered += 1
        if self._head_timer is not None:
            self._head_timer.cancel()

    def on_body(self, body: bytes) -> None:  # noqa: ARG002 - httptools' signature
        """Called by the parser for a part of a body."""
        self.head_bytes = 0

    def on_message_complete(self) -> None:
        """Called by the parser at the end of a request: ends the discarding of its body."""
        self.head_bytes = 0
        self._in_body = False
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
            if self.is_ending:
                self.transport.close()
            else:  # the timeout of the next head may have passed while the body was discarded
                self._await_head(self.limits.keep_alive_timeout + self.limits.header_timeout)

    def end_exchange(self) -> None:
        """Note that a request has its whole answer. Discards the rest of its body, and waits for the next head."""
        self.unanswered -= 1
        if self.transport.is_closing():
            return
        if not self.unanswered:
            if self._is_half_closed:
                self.transport.close()
                return
            if self._in_body:
                self._linger()
        self._await_head(self.limits.keep_alive_timeout + self.limits.header_timeout)

    def close_after_answer(self) -> None:
        """Close the connection once its client can have read the answer. A second call closes it at once."""
        if self._linger_timer is not None or not self._in_body:
            self.transport.close()
            return
        if self.transport.is_closing():
            return
        self.is_ending = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger()

    def _follow_framing(self, data: bytes) -> None:
        """Find where requests begin and end. Ignores all data after an error, which uvicorn's parser answers."""
        if self._is_malformed:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an ordinary request for uvicorn too, as nothing is upgraded
        except httptools.HttpParserError:
            self._is_malformed = True
            self._in_body = False

    def _await_head(self, seconds: float) -> None:
        """Start the timeout of the next request's head, in place of an earlier one."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self._loop.call_later(seconds, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        """Close the connection, with a 408 if a part of a head was received."""
        if self.unanswered or self._linger_timer is not None:  # these have timeouts of their own
            return
        if self.head_bytes:
            self._refuse(408, f"the request's headers were not complete within {self.limits.header_timeout:g} s")
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Discard the rest of a body, at most `LINGER_BYTES`, and close the connection after `LINGER_S` seconds."""
        if self._linger_timer is None:
            self._discarded_bytes = 0
            self._linger_timer = self._loop.call_later(LINGER_S, self.transport.close)
            self.transport.resume_reading()

    def _probe(self, interval: float) -> None:
        """Send something that clients discard: one that no longer listens resets the connection.

        Starts the timer of the next probe, in `interval` seconds; the interval doubles up to `LAST_PROBE_S`.
        """
        if self.transport.is_closing():
            return
        exchange = self.exchange
        if exchange is not None and not exchange.complete:
            if not exchange.started:
                if exchange.scope["http_version"] == "1.1":
                    self.transport.write(_CONTINUE)
            # Buffered data is a probe too, and a comment queued behind it might follow the end of the stream.
            elif not self.transport.get_write_buffer_size():
                self._probe_task = self._loop.create_task(exchange.send_comment())
        self.probe_timer = self._loop.call_later(interval, self._probe, min(2 * interval, LAST_PROBE_S))

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer with an error before there is a whole request, and close the connection."""
        body = bytes(error_response(ApiError(status, message, code=code)).body)
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write((line + head).encode("ascii") + body)
        self.transport.close()


class _Transport:
    """The transport that uvicorn gets. Closing it waits until the client can have read the answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._transport = connection.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether uvicorn has closed the connection, or it is lost."""
        return self._connection.is_ending or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write, unless the connection is closing: asyncio would log a warning."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection after the answer (`Connection.close_after_answer`)."""
        self._connection.close_after_answer()


class Exchange:
    """One request and its answer."""

    def __init__(self, connection: Connection, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.started = False
        self.complete = False
        self._has_body = False  # the application has received the request's whole body
        self._connection = connection
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """Return the next part of the body, and after the last one wait for the client to disconnect.

        The disconnect is watched here, as uvicorn reports it only to the last of several pipelined requests.
        """
        if not self._has_body:
            message = await self._receive()
            self._has_body = not message.get("more_body", False)
            return message
        lost = self._connection.lost
        if lost.done():
            return dict(_DISCONNECT)
        next_message = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((next_message, lost), return_when=asyncio.FIRST_COMPLETED)
            return next_message.result() if next_message.done() else dict(_DISCONNECT)
        finally:
            next_message.cancel()

    async def send(self, message: Message) -> None:
        """Pass a part of the answer on, and tell the connection once the answer is complete."""
        await self._send(message)
        self.started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not self.complete:
            self.complete = True
            self._connection.end_exchange()

    async def send_comment(self) -> None:
        """Send the stream's `comment`, which clients discard. Does nothing if the answer is complete or no stream."""
        comment = self.scope["state"].get("comment")
        if comment is not None and not self.complete:
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    async def finish(self) -> None:
        """End an incomplete answer. If the client is gone, uvicorn would otherwise log an error of the application."""
        if self._connection.lost.done():
            if not self.started:
                await self._send({"type": "http.response.start", "status": CLOSED_BY_CLIENT, "headers": []})
            await self._send({"type": "http.response.body", "body": b""})
        self._connection.end_exchange()


class Exchanges:
    """ASGI middleware, the outermost one: tells connections about their requests and answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on as an `Exchange` of its connection, if it came by one."""
        connection = scope.get("state", {}).pop(_STATE, None) if scope["type"] == "http" else None
        if connection is None:
            await self._app(scope, receive, send)
            return
        exchange = connection.exchange = Exchange(connection, scope, receive, send)
        await self._app(scope, exchange.receive, exchange.send)
        if not exchange.complete:
            await exchange.finish()


def connection_class(limits: ServerLimits) -> type[Connection]:
    """Return a class of connections with these limits, of which uvicorn makes an instance for each client."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "connections": set()})
