"""Clients that send slowly, too much, half or nothing: through raw sockets on the loopback."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest

from remask.server.connection import LAST_PROBE_S, LINGER_S, MAX_HEAD_BYTES, Connection
from tests.server.serving import CHATS, LONG, SLOW, URL, Running, held, left_alone, make_llm, serving
from tests.waiting import LONGEST_S, LeapingLoop, eventually

COMPLETIONS = "/v1/completions"
SESSION = "/playground/pages"
HEADER_TIMEOUT, BODY_TIMEOUT, KEEP_ALIVE = 2000.0, 3000.0, 1000.0  # on a clock that leaps


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server on whose clock no limit passes unless a test lets it."""
    limits: dict[str, Any] = {
        "header_timeout": HEADER_TIMEOUT,
        "body_timeout": BODY_TIMEOUT,
        "keep_alive_timeout": KEEP_ALIVE,
        "max_connections": 250,
    }
    with serving(make_llm(max_num_seqs=2), loop_factory=LeapingLoop, **limits) as running:
        yield running


def connect(running: Running) -> socket.socket:
    host, port = running.base.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=LONGEST_S)


def leap(running: Running, seconds: float) -> None:
    """Let so many seconds pass for the server's event loop."""
    loop = running.server._loop
    assert isinstance(loop, LeapingLoop)
    loop.leap(seconds)


def connections(running: Running) -> list[Connection]:
    kind = running.server.config.http
    assert isinstance(kind, type)
    assert issubclass(kind, Connection)
    return list(kind.connections)


def other_end(running: Running, connection: socket.socket) -> Connection | None:
    name = connection.getsockname()
    return next((each for each in connections(running) if each.client == name), None)


def has_read(running: Running, connection: socket.socket, size: int) -> bool:
    """Whether the server has got so many bytes of a head."""
    end = other_end(running, connection)
    return end is not None and end.head_bytes == size


def answering(running: Running, connection: socket.socket) -> bool:
    """Whether the server has got a whole head, and works on its request."""
    end = other_end(running, connection)
    return end is not None and end.unanswered > 0


def found_out(running: Running) -> bool:
    """Whether the engine has been told, by the next probe, that a client has left."""
    leap(running, LAST_PROBE_S)
    return bool(running.service.engine._commands)


def head(body: bytes | int, *headers: str, url: str = COMPLETIONS, version: str = "1.1") -> bytes:
    """A request's line and headers, for a body or for one of so many bytes."""
    length = body if isinstance(body, int) else len(body)
    lines = [
        f"POST {url} HTTP/{version}",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


def everything(connection: socket.socket) -> bytes:
    """All bytes until the server closes. A reset fails the test."""
    parts = []
    while piece := connection.recv(1 << 16):
        parts.append(piece)
    return b"".join(parts)


def answers(raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    """The statuses and JSON bodies of final responses that follow each other."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status >= 200:
            lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            length = int(lines[b"content-length"])
            found.append((status, json.loads(raw[:length])))
            raw = raw[length:]
    return found


def body_of(**fields: Any) -> bytes:
    return json.dumps({"prompt": "from ivy", "max_tokens": 8, "block_length": 8, "steps": 8, **fields}).encode()


def test_two_hundred_clients_that_never_end_their_headers_are_closed(hasty: Running) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(hasty)) for _ in range(200)]
        for number, each in enumerate(slow):
            if number % 2:
                each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        for number, each in enumerate(slow):
            eventually(partial(has_read, hasty, each, 48 * (number % 2)))
        leap(hasty, 0.9 * HEADER_TIMEOUT)
        assert hasty.ask().status_code == 200, "others are answered meanwhile"
        assert all(other_end(hasty, each) for each in slow)
        leap(hasty, 0.2 * HEADER_TIMEOUT)
        for number, each in enumerate(slow):
            if number % 2:
                ((status, told),) = answers(everything(each))
                assert (status, told["error"]["code"]) == (408, "request_timeout")
            else:
                assert everything(each) == b""


def test_headers_byte_by_byte_do_not_put_the_end_off(hasty: Running) -> None:
    with connect(hasty) as slow:
        sent = 0
        for piece in (b"POST /v1/completions HTTP/1.1\r\nX: ", b"x", b"x", b"x"):
            slow.sendall(piece)
            sent += len(piece)
            eventually(partial(has_read, hasty, slow, sent))
            leap(hasty, 0.3 * HEADER_TIMEOUT)
        assert everything(slow).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("filler", [b"\r\n", b"GET /health HTTP/1.1\r\n"])
def test_a_connection_that_was_used_is_closed_when_it_idles(hasty: Running, filler: bytes) -> None:
    """Neither nothing at all nor half a head keeps it open."""
    for more in (b"", filler):
        with connect(hasty) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            leap(hasty, 0.5 * KEEP_ALIVE)
            assert other_end(hasty, connection) is not None
            if more:
                connection.sendall(more)
                eventually(partial(has_read, hasty, connection, len(more)))
            leap(hasty, KEEP_ALIVE + HEADER_TIMEOUT)
            everything(connection)


def test_a_late_end_of_a_refused_body_leaves_no_connection_open(
    hasty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remask.server.connection.LINGER_S", 10 * (KEEP_ALIVE + HEADER_TIMEOUT))
    body = b"x" * 5_000_000
    with connect(hasty) as connection:
        connection.sendall(head(body) + body[:1000])
        connection.recv(1, socket.MSG_PEEK)
        end = other_end(hasty, connection)
        assert end is not None
        for rest in (body[1000:2000], body[2000:]):
            connection.sendall(rest)
            eventually(partial(lambda end, left: end._discarded_bytes >= left, end, len(rest)))
            leap(hasty, 1.1 * (KEEP_ALIVE + HEADER_TIMEOUT))
        assert [status for status, _ in answers(everything(connection))] == [413]


@pytest.mark.parametrize("url", [COMPLETIONS, URL, "/tokenize", f"{SESSION}/x/caching"])
def test_slow_bodies_are_a_408(hasty: Running, url: str) -> None:
    with connect(hasty) as slow:
        slow.sendall(head(100, url=url) + b'{"prompt"')
        eventually(lambda: answering(hasty, slow))
        leap(hasty, 1.01 * BODY_TIMEOUT)
        ((status, told),) = answers(everything(slow))
        assert (status, told["error"]["code"]) == (408, "request_timeout")
        assert f"{BODY_TIMEOUT:g} s" in told["error"]["message"]


def test_headers_without_an_end_are_a_431(hasty: Running) -> None:
    with connect(hasty) as connection:
        line = b"GET /health HTTP/1.1\r\nX: "
        sent = 0
        for piece in (line + b"y" * (MAX_HEAD_BYTES - len(line)), b"y" * 100):
            connection.sendall(piece)
            sent += len(piece)
            eventually(partial(has_read, hasty, connection, sent))
        connection.sendall(b"y" * 100)
        assert everything(connection).startswith(b"HTTP/1.1 431 ")
        with pytest.raises(OSError):  # noqa: PT012 - reset or broken pipe
            for _ in range(4000):
                connection.sendall(b"y" * 1000)
    assert hasty.client.get("/health", headers={"X-Long": "y" * 30_000}).status_code == 200


def test_more_connections_than_allowed_are_a_503() -> None:
    with serving(max_connections=3) as running, ExitStack() as stack:
        held = [stack.enter_context(connect(running)) for _ in range(3)]
        over = stack.enter_context(connect(running))
        ((status, told),) = answers(everything(over))
        assert status == 503
        assert "3 connections" in told["error"]["message"]
        assert told["error"]["code"] == "too_many_connections"
        held.pop().close()
        eventually(lambda: len(connections(running)) == 2)
        again = stack.enter_context(connect(running))
        again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert everything(again).startswith(b"HTTP/1.1 200 ")


@pytest.mark.few(5)
@pytest.mark.parametrize("url", [COMPLETIONS, URL, f"{SESSION}/x/caching"])
@pytest.mark.parametrize("more", [(), ("Connection: close",)])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_clients_see_the_413(server: Running, url: str, more: tuple[str, ...], version: str) -> None:
    """The whole body is sent before anything is read; a reset would be an error here."""
    body = b"x" * 5_000_000
    with connect(server) as connection:
        connection.sendall(head(body, *more, url=url, version=version))
        connection.recv(1, socket.MSG_PEEK)  # the answer is there before the body
        for at in range(0, len(body), 100_000):
            connection.sendall(body[at : at + 100_000])
        connection.shutdown(socket.SHUT_WR)
        ((status, told),) = answers(everything(connection))
        assert (status, told["error"]["code"]) == (413, "request_too_large")


def test_common_clients_see_the_413(server: Running) -> None:
    body = b"x" * 5_000_000
    asked = urllib.request.Request(f"{server.base}{COMPLETIONS}", data=body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=LONGEST_S)
    with caught.value:
        assert caught.value.code == 413
    assert httpx.post(f"{server.base}{COMPLETIONS}", content=body, timeout=LONGEST_S).status_code == 413
    pieces = (body[at : at + 50_000] for at in range(0, len(body), 50_000))
    assert httpx.post(f"{server.base}{COMPLETIONS}", content=pieces, timeout=LONGEST_S).status_code == 413


def test_after_a_413_the_connection_takes_further_requests(server: Running) -> None:
    body = b"x" * 5_000_000
    with connect(server) as connection:
        connection.sendall(head(body) + body + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert [status for status, _ in answers(everything(connection))] == [413, 200]


def test_a_body_without_an_end_is_not_read_for_ever(
    server: Running, hasty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remask.server.connection.LINGER_BYTES", 1 << 20)
    with connect(server) as connection, pytest.raises(OSError):  # noqa: PT012 - reset or broken pipe
        connection.sendall(head(10**12))
        for _ in range(10_000):
            connection.sendall(b"x" * 10_000)
    with connect(hasty) as connection:
        connection.sendall(head(10**12))
        connection.recv(1, socket.MSG_PEEK)
        leap(hasty, 1.1 * LINGER_S)
        assert [status for status, _ in answers(everything(connection))] == [413], "and closed without a body"


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_half_closed_client_gets_its_answer(server: Running, version: str) -> None:
    alone = server.client.post(COMPLETIONS, content=body_of(**LONG), headers={"Content-Type": "application/json"})
    with connect(server) as connection:
        body = body_of(**LONG)
        connection.sendall(head(body, version=version) + body)
        connection.shutdown(socket.SHUT_WR)
        ((status, told),) = answers(everything(connection))
        assert status == 200
        assert told["choices"] == alone.json()["choices"]


def test_a_half_closed_client_gets_its_stream_and_all_it_has_asked_for(server: Running) -> None:
    with connect(server) as connection:
        body = body_of(stream=True)
        connection.sendall(head(body) + body)
        connection.shutdown(socket.SHUT_WR)
        assert b"data: [DONE]\n\n" in everything(connection)
    with connect(server) as connection:
        both = [body_of(max_tokens=8), body_of(max_tokens=16, steps=16)]
        connection.sendall(b"".join(head(body) + body for body in both))
        connection.shutdown(socket.SHUT_WR)
        counts = [told["usage"]["completion_tokens"] for _, told in answers(everything(connection))]
        assert len(counts) == 2


@pytest.mark.few(3)
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_has_gone_is_found_out(
    hasty: Running, caplog: pytest.LogCaptureFixture, half: bool, pipelined: bool, stream: bool
) -> None:
    """Also one that first closes its sending side, and later goes."""
    body = json.dumps({"messages": CHATS[0], **SLOW, "max_tokens": 512, "steps": 512, "stream": stream}).encode()
    request = head(body, url=URL) + body
    before = hasty.service.llm.engine.stats.steps
    with held(hasty, steps=4) as hold:
        with connect(hasty) as connection:
            connection.sendall(request * (2 if pipelined else 1))
            hold.wait()
            if half:
                connection.shutdown(socket.SHUT_WR)
                end = other_end(hasty, connection)
                assert end is not None
                eventually(lambda: end.probe_timer is not None)
                for _ in range(4):
                    leap(hasty, LAST_PROBE_S)
                assert hasty.open == 1, "it may still listen"
                assert not hasty.service.engine._commands
        if half:
            eventually(partial(found_out, hasty))
        left_alone(hasty)
    hasty.settle()
    assert hasty.service.llm.engine.stats.steps <= before + 5, "it was not run to its end"
    assert not [record for record in caplog.records if record.name == "uvicorn.error" and record.levelname == "ERROR"]


def test_an_upgrade_is_an_ordinary_request(server: Running) -> None:
    """Whichever packages are installed: a WebSocket would be under no limit."""
    lines = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    with connect(server) as connection:
        connection.sendall("\r\n".join(["GET /health HTTP/1.1", "Host: localhost", *lines, "", ""]).encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_half_a_request_and_its_end_is_none(hasty: Running) -> None:
    for raw in (b"POST /v1/compl", head(100) + b"{"):
        with connect(hasty) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            assert everything(connection) == b""
    hasty.settle()
