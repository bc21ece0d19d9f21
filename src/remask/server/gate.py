"""Checks that every request passes (id, API key, body size), and the access log."""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remask.machine.log_format import FIELDS
from remask.server.config import ServerConfig
from remask.server.errors import CLOSED_BY_CLIENT, ApiError, ClientGoneError, error_response
from remask.server.pages import FILES, SLASHED

log = logging.getLogger(__name__)

PROBES = frozenset(["/health", "/ping", "/live", "/ready"])  # they tell other sites' pages nothing of use
OPEN_PATHS = frozenset([*PROBES, *FILES, SLASHED])  # health probes have no key, and pages ask for one
METRICS = "/metrics"
MAX_SHOWN = 100  # characters of a client's header in its error
MAX_LENGTH_DIGITS = 18  # a Content-Length with more digits is refused unread
ANY = "*"
LEFT_OUT = "X-Remask-Left-Out"
LOOPBACK = "localhost"
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """ASGI middleware. Answers HEAD as GET, and ignores the proxy's prefix of a path and a slash at its end.

    Sets in `scope["state"]` the `request_id`; `log_fields`, which the access log writes; `client`, which tells clients
    apart by their keys or else by their addresses; and `leads`, whether the request may have a priority before others:
    it has one of the `priority_keys`, or there are none.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self.max_body_bytes = config.max_body_bytes
        self.body_timeout = config.body_timeout
        self._root_path = config.root_path
        self._keys = [key.encode() for key in config.api_keys]
        self._priority_keys = [key.encode() for key in config.priority_keys]
        self._open_paths = OPEN_PATHS | ({METRICS} if config.open_metrics else frozenset())
        # A page of another site has no key, and browsers add none.
        self._hosts = AllowedHosts([ANY] if self._keys or self._priority_keys else config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request on with its body read, or refuse it. Writes the access log.

        An exception of the application is logged with its traceback, and answered with a 500 if nothing was sent yet.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        original = scope
        scope = {**scope, "path": self._plain_path(scope["path"])}
        is_head = scope["method"] == "HEAD"
        if is_head:
            scope["method"] = "GET"
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        log_fields: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, log_fields=log_fields)
        status = CLOSED_BY_CLIENT

        async def send_with_id(message: Message) -> None:
            """Add headers to the answer, and note its status. Empties the body of an answer to HEAD."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answer_headers = MutableHeaders(scope=message)
                answer_headers["X-Request-Id"] = request_id
                if "left_out" in log_fields:
                    answer_headers[LEFT_OUT] = log_fields["left_out"]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id, original["path"])
        except ClientGoneError:
            log.debug("request %s: the client went away", request_id)
        # A defect of the server.
        except Exception as error:
            log.error("request %s failed: %s", request_id, error, exc_info=True)
            if status == CLOSED_BY_CLIENT:
                failure = ApiError(500, "the server failed; its log says why")
                await error_response(failure, scope)(scope, receive, send_with_id)
        finally:
            line = {"id": request_id, "method": original["method"], "path": original["path"], "status": status}
            line |= log_fields
            line["total_ms"] = round(1e3 * (time.perf_counter() - start), 1)
            log.info("%s", json.dumps(line), extra={FIELDS: line})

    async def _answer(self, scope: Scope, receive: Receive, send: Send, original_path: str) -> None:
        """Answer a request by the application, or with the error that refuses it. Raises `ClientGoneError`."""
        try:
            body = await self._admit(scope, Headers(scope=scope), receive)
        except ApiError as refusal:
            await error_response(refusal, scope)(scope, receive, send)
            return
        # From the prefix without a slash, relative addresses would lead beyond it.
        is_bare_prefix = scope["method"] == "GET" and original_path == self._root_path
        app = RedirectResponse(f"{self._root_path}/") if is_bare_prefix else self.app
        await app(scope, _receive_after(body, receive), send)

    def _plain_path(self, path: str) -> str:
        """A path without the proxy's prefix, and without a slash at its end unless that has a page of its own."""
        if self._root_path and f"{path}/".startswith(f"{self._root_path}/"):
            path = path[len(self._root_path) :] or "/"
        return path if path in ("/", SLASHED) else path.removesuffix("/")

    async def _admit(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        """Return the body of a request that may be answered, and set `leads` and `client` in its state.

        Raises `ApiError` for an unknown host, a missing key, and a body that is too large or too slow.
        """
        if not self._hosts.admit(headers.get("host", "")) and scope["path"] not in PROBES:
            name = headers["host"][:MAX_SHOWN]
            raise ApiError(
                403, f"this server is not called {name!r}; start it with --allowed-hosts {name}, or with an API key"
            )
        key, leads = self._find_key(headers)
        scope["state"].update(leads=leads, client=_address(scope) if key is None else key)
        if key is None and (self._keys or self._priority_keys) and scope["path"] not in self._open_paths:
            raise ApiError(
                401,
                "an API key is needed, as the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'; this one is "
                "unknown",
            )
        try:
            async with asyncio.timeout(self.body_timeout):
                return await self._read_body(headers, receive)
        except TimeoutError:
            raise ApiError(408, f"the body was not complete within {self.body_timeout:g} s") from None

    def _find_key(self, headers: Headers) -> tuple[str | None, bool]:
        """Return a name for the known key in the headers, safe to log, or None; and whether the request `leads`.

        OpenAI's clients send the key as `Authorization`, Anthropic's as `X-Api-Key`, which counts beside an
        `Authorization` of another scheme. The time of the comparison does not depend on the key that was sent.
        """
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        key_bytes = key.strip().encode("latin-1", "replace")
        known_keys = (*self._priority_keys, *self._keys)
        matches = [hmac.compare_digest(key_bytes, known_key) for known_key in known_keys]
        name = f"key {matches.index(True)}" if any(matches) else None
        leads = not self._priority_keys or any(matches[: len(self._priority_keys)])
        return name, leads

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        """Read the whole body. Raises a 413 if it is too large, and a 400 if `Content-Length` is not a number.

        Raises `ClientGoneError` if the client disconnects first.
        """
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()):
            name = length[:MAX_SHOWN]
            raise ApiError(400, f"Content-Length is {name!r}; it must be the body's number of bytes in decimal digits")
        if len(length) > MAX_LENGTH_DIGITS or int(length) > self.max_body_bytes:
            raise self._too_large_error()
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client closed the connection before the end of its request")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_body_bytes:
                raise self._too_large_error()
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large_error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes, the most that this server accepts")


def _receive_after(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the whole `body` first, and then calls the original one."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_body_first() -> Message:
        message = next(messages, None)
        return await receive() if message is None else message

    return receive_body_first


def _address(scope: Scope) -> str:
    """Return the client's address. Of IPv6 it is the network of 64 bits, as one client has all addresses in that."""
    host = (scope.get("client") or ("",))[0]
    address = _ip(host)
    if isinstance(address, ipaddress.IPv6Address):
        return f"address {address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False)}"
    return f"address {address or host}"


class AllowedHosts:
    """The host names that a server answers to: the loopback's and `names`. `*` in `names` allows any.

    The owner of another site may point its name to this machine's address, and its page then calls this server as a
    page of the same origin (DNS rebinding). Only the header `Host` shows it: it has the name of that site. So a `Host`
    that is an address is allowed, and so is a request without one, which no browser sends.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset({LOOPBACK, *map(_plain, names)})

    def admit(self, header: str) -> bool:
        """Whether a request with this `Host` header, a name with or without a port, may be answered."""
        host = _plain(header)
        if ANY in self._names or not host or host in self._names:
            return True
        return host.endswith(f".{LOOPBACK}") or _ip(host) is not None


def _plain(host: str) -> str:
    """A host name or address in lower case, without brackets, its port and the dot at its end."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    has_port = bool(colon) and ":" not in name and (port.isdecimal() or not port)
    return (name if has_port else host).removesuffix(".")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` spells, its zone ignored. Returns None if it is a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0])
    return None
