"""One HTTP connection: uvicorn's, with limits on what a client may make the server wait for and hold."""

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from remask.errors import ConfigError
from remask.server.errors import ApiError, error_response
from remask.server.limits import ServerLimits

MAX_HEAD_BYTES = 64 << 10  # of a request's line and headers, and of the trailers behind its body
LINGER_S = 10.0  # an answer that was given early reaches the client while it still sends, for this long
LINGER_BYTES = 64 << 20  # and for so many bytes
FIRST_PROBE_S, LAST_PROBE_S = 0.1, 5.0  # seconds until a silent client is probed first, and most between two probes
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Methods of uvicorn's that are not public. Without them a limit here would silently do nothing.
_NEEDED = ("_start_asgi_task", "_unset_keepalive_if_required")


class Connection(HttpToolsProtocol):
    """A connection that no client can hold open without making progress.

    - A request's line and headers must be complete in time, and may be `MAX_HEAD_BYTES` long.
    - An answer that is given before the whole body has come (401, 413) is not lost: the rest of the body is read and
      discarded for a while. Closing at once would reset the connection, and the client would not see the answer.
    - A client that closes only its sending side gets its answers. Whether it still listens is found out by interim
      responses, and within a stream by the `comment` in its scope's state; clients discard both.
    """

    limits: ClassVar[ServerLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._active: RequestResponseCycle | None = None  # the one that is being answered
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes since the last complete head or piece of a body
        self._discarded = 0  # bytes that came after the answer to their own request
        self._in_body = False
        self._ends = False  # the connection closes once the rest of the body is discarded

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock, or refuse the connection where there are too many."""
        super().connection_made(transport)
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
        for timer in (self._head_timer, self._linger_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse what has come. Refuse heads and trailers that are too long."""
        if self.transport.is_closing():
            return
        if self._linger_timer is not None:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.transport.close()
                return
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEAD_BYTES + len(data) and not self.transport.is_closing():
            self._refuse(431, f"the request's line and headers exceed {MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Returns whether the connection stays open for the answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._unread:
            return False
        cycle.keep_alive = False
        self._probe(FIRST_PROBE_S)
        return True

    def on_headers_complete(self) -> None:
        """Stop the clock of the head, and begin the request."""
        self._unread, self._in_body = 0, True
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _Lingering(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request has come."""
        self._unread, self._in_body = 0, False
        super().on_message_complete()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
            # Whether the client sends another request or not, `_await_head` ends the connection in time.
            if self._ends:
                self.transport.close()

    def on_response_complete(self) -> None:
        """Begin the next request. Where this one has not come as a whole, discard the rest of it."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._in_body and not self.pipeline:
            self._linger()
        self._await_head(self.limits.keep_alive_timeout + self.limits.header_timeout)

    def close_after_answer(self) -> None:
        """End the connection once its client can have read the answer."""
        if self.transport.is_closing():
            return
        if not self._in_body:
            self.transport.close()
            return
        self._ends = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _await_head(self, seconds: float) -> None:
        """Give the client so many seconds to send its next request's head."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(seconds, self._no_head)

    def _no_head(self) -> None:
        answering = self._active is not None and not self._active.response_complete
        if answering or self._linger_timer is not None:  # another clock runs for these
            return
        if self._unread:
            self._refuse(408, f"the request's headers were not complete within {self.limits.header_timeout:g} s")
        else:
            self.transport.close()

    def _linger(self) -> None:
        if self._linger_timer is None:
            self._discarded = 0
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
            self.flow.resume_reading()

    def _probe(self, wait: float) -> None:
        """Find out whether a client that sends no more still listens: one that does not resets the connection."""
        cycle = self._active
        if cycle is None or self.transport.is_closing() or self.cycle.response_complete:
            return
        comment: bytes | None = cycle.scope["state"].get("comment")
        if not cycle.response_started:
            if cycle.scope["http_version"] == "1.1":
                self.transport.write(_CONTINUE)
        elif comment is not None and cycle.chunked_encoding:
            self.transport.write(b"%x\r\n%b\r\n" % (len(comment), comment))
        self._probe_timer = self.loop.call_later(wait, self._probe, min(2 * wait, LAST_PROBE_S))

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer what is no whole request, and close the connection."""
        body = bytes(error_response(ApiError(status, message, code=code)).body)
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write((line + head).encode("ascii") + body)
        self.transport.close()


class _Lingering:
    """The transport as one request's answer sees it: closing it waits until the client can have read the answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """Close the connection gently."""
        self._connection.close_after_answer()


def connection_class(limits: ServerLimits) -> type[Connection]:
    """Return a class of connections with these limits, which uvicorn makes one of for each client.

    Raises `ConfigError` where the installed uvicorn is not of the form that `Connection` builds on.
    """
    lacking = [name for name in _NEEDED if not hasattr(HttpToolsProtocol, name)]
    if lacking:
        raise ConfigError(
            f"uvicorn {uvicorn.__version__} has no {' and no '.join(lacking)}, on which the limits of connections "
            "rest; install another version of it, such as 0.54"
        )
    return type("LimitedConnection", (Connection,), {"limits": limits})
