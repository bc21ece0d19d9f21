"""Checks that every request passes (id, API key, body size), and the access log."""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remask.machine.log_format import FIELDS
from remask.server.errors import ApiError, error_response
from remask.server.hosts import ANY, AllowedHosts
from remask.server.playground.files import FILES
from remask.server.reference.files import FILES as REFERENCE
from remask.server.responses import CLOSED_BY_CLIENT, ClientGoneError

log = logging.getLogger(__name__)

PROBES = frozenset(["/health", "/ping"])  # which say nothing of use to other sites' pages
OPEN_PATHS = frozenset([*PROBES, *FILES, *REFERENCE])  # health probes have no key, and pages ask for one
MAX_SHOWN = 100  # characters of a foreign name in its error
MAX_LENGTH_DIGITS = 18  # a Content-Length with more digits is refused unread
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """ASGI middleware. Sets `request_id`, `log_fields`, `leads` and `client` in `scope["state"]`.

    The access log writes `log_fields`. `client` tells clients apart, by their keys or else by their addresses. `leads`
    says whether the request may have a priority before others: it has one
    of the `priority_keys`, or there are none.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_body_bytes: int,
        *,
        priority_keys: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        body_timeout: float,
    ) -> None:
        self.app, self.max_body_bytes, self.body_timeout = app, max_body_bytes, body_timeout
        self._keys = tuple(key.encode() for key in api_keys)
        self._priority_keys = tuple(key.encode() for key in priority_keys)
        # A page of another site has no key, and browsers add none.
        self._hosts = AllowedHosts([ANY] if api_keys or priority_keys else allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else secrets.token_hex(16)
        log_fields: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=name, log_fields=log_fields)
        status = CLOSED_BY_CLIENT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self._answer(scope, headers, receive, send_with_id)
        except ClientGoneError:
            log.debug("request %s: the client went away", name)
        # A defect of the server. The client still gets an answer, and the log has the traceback.
        except Exception as error:
            log.error("request %s failed: %s", name, error, exc_info=True)
            if status == CLOSED_BY_CLIENT:
                failed = ApiError(500, "the server failed; its log says why")
                await error_response(failed, scope)(scope, receive, send_with_id)
        finally:
            line = {"id": name, "method": scope["method"], "path": scope["path"], "status": status, **log_fields}
            line["total_ms"] = round(1e3 * (time.perf_counter() - started), 1)
            log.info("%s", json.dumps(line), extra={FIELDS: line})

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if not self._hosts.admit(headers.get("host", "")) and scope["path"] not in PROBES:
            name = headers["host"][:MAX_SHOWN]
            foreign = ApiError(
                403, f"this server is not called {name!r}; start it with --allowed-hosts {name}, or with an API key"
            )
            await error_response(foreign, scope)(scope, receive, send)
            return
        key, leads = self._key(headers)
        known = key is not None or not (self._keys or self._priority_keys)
        scope["state"].update(leads=leads, client=_address(scope) if key is None else key)
        if not known and scope["path"] not in OPEN_PATHS:
            error = ApiError(
                401,
                "an API key is needed, as the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'; this one is "
                "unknown",
            )
            await error_response(error, scope)(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.body_timeout):
                body = await self._body(headers, receive)
        except TimeoutError:
            slow = ApiError(408, f"the body was not complete within {self.body_timeout:g} s")
            late = error_response(slow, scope)
            late.headers["Connection"] = "close"
            await late(scope, receive, send)
            return
        if body is None:
            error = ApiError(
                413, f"the body is larger than {self.max_body_bytes} bytes, the most that this server accepts"
            )
            await error_response(error, scope)(scope, receive, send)
            return
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _key(self, headers: Headers) -> tuple[str | None, bool]:
        """Which known key the headers hold, in words that do not tell it, if any; and whether the request may lead.

        OpenAI's clients send it as `Authorization`, Anthropic's as `X-Api-Key`.

        The time of the comparison does not depend on the key that was sent.
        """
        scheme, _, key = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        bearer = scheme.lower() == "bearer"
        plain, leading = (
            [bearer and hmac.compare_digest(given, own) for own in keys] for keys in (self._keys, self._priority_keys)
        )
        found = [*leading, *plain]
        name = f"key {found.index(True)}" if any(found) else None
        return name, any(leading) or not self._priority_keys

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Read the whole body; None if it is too large."""
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > MAX_LENGTH_DIGITS or int(length) > self.max_body_bytes:
            return None
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client closed the connection before the end of its request")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.max_body_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


def _address(scope: Scope) -> str:
    """Where a request comes from. Of IPv6 the network of 64 bits, as one client has all addresses of such a network."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return f"address {host}"
    if isinstance(address, ipaddress.IPv6Address):
        return f"address {address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False)}"
    return f"address {address}"
