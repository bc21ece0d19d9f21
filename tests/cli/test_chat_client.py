"""The client of `remask chat --base-url` against servers that answer in every wrong way."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from remask.cli.chat import ChatClient
from remask.errors import ConfigError, RemaskError

ASK = {"model": "m", "messages": []}


@contextmanager
def answering(status: int, body: str) -> Iterator[tuple[ChatClient, list[tuple[str, str | None]]]]:
    """A client of a server that answers everything with this, and the paths and keys that it was sent."""
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer  # noqa: N815 - the base class's names

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield ChatClient(f"http://127.0.0.1:{server.server_address[1]}/v1/", "key"), seen
        finally:
            server.shutdown()
            thread.join()


def event(text: str) -> str:
    return f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'


def test_pieces_of_text_in_their_order() -> None:
    role, end = 'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n', 'data: {"choices": [], "usage": {}}\n\n'
    with answering(200, f": comment\n\n{role}{event('né')}{event(' two')}{end}data: [DONE]\n\n") as (client, seen):
        assert "".join(client.stream(ASK)) == "né two"
    assert seen == [("/v1/chat/completions", "Bearer key")]


def test_the_first_model_is_that_of_the_list() -> None:
    with answering(200, '{"data": [{"id": "a"}, {"id": "b"}]}') as (client, seen):
        assert client.first_model() == "a"
    assert seen == [("/v1/models", "Bearer key")]


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, '{"data": []}', "lists no model; name one with --model"),
        (200, '{"object": "list"}', "lists no models; is this the URL of an API that ends in /v1"),
        (200, '{"data": [{"name": "a"}]}', "lists no models"),
        (200, "[1]", "is not a JSON object"),
        (200, "<html>", "not JSON: b'<html>'"),
        (404, '{"detail": "Not Found"}', "status 404"),
        (502, "<html>bad gateway", "status 502: <html>bad gateway"),
        (401, '{"error": {"message": "wrong key"}}', "status 401: wrong key"),
        (400, '{"error": "no object"}', "status 400: no object"),
        (500, "", "status 500"),
    ],
)
def test_what_is_no_list_of_models_is_an_error_with_its_cause(status: int, body: str, text: str) -> None:
    with answering(status, body) as (client, _), pytest.raises(RemaskError, match=text.replace("?", r"\?")):
        client.first_model()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (event("a") + 'data: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (event("a") + "data: {half\n\n", "not JSON"),
    ],
)
def test_an_answer_that_breaks_off_says_why(body: str, text: str) -> None:
    with answering(200, body) as (client, _):
        pieces = client.stream(ASK)
        assert next(pieces) == "a"
        with pytest.raises(RemaskError, match=text):
            next(pieces)


def test_other_urls_are_refused() -> None:
    for url in ("localhost:8000", "file:///etc/hosts", ""):
        with pytest.raises(ConfigError, match="--base-url must begin with http"):
            ChatClient(url)
    with pytest.raises(RemaskError, match=r"the connection to http://127\.0\.0\.1:9/v1 failed: .*is a server running"):
        ChatClient("http://127.0.0.1:9/v1").models()
    with pytest.raises(RemaskError, match="failed"):
        ChatClient("http://[bad/v1").models()
