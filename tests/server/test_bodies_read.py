"""Large bodies are read in a process of their own, to the same end as small ones."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import given, settings

from remask.server import bodies
from remask.server.app import router
from remask.server.bodies import SMALL_BYTES, BodyReaders, BodyRoute, read_body
from remask.server.errors import ApiError
from remask.server.protocol.conversation import TokenizeBody
from remask.server.protocol.generation import ChatBody, CompletionBody
from remask.server.protocol.reads import DecisionsBody
from tests.server.bodies import bodies as drawn
from tests.server.serving import Running
from tests.waiting import LONGEST_S, eventually

COMPLETIONS = "/v1/completions"
PAD = " " * SMALL_BYTES  # blanks around a body make it a large one
JSON = {"Content-Type": "application/json"}
MOST = 1 << 19
CHAT = {"messages": [{"role": "user", "content": "a"}]}
EVENT = {"step": 0, "positions": [1], "token_ids": [5]}
RIGHT: list[tuple[Any, dict[str, Any]]] = [
    (CompletionBody, {"prompt": ["a", "b"], "temperature": 0.5, "stop": ["x"], "n": 2}),
    (CompletionBody, {"prompt": "a", "canvas": [{"mask": 3}, {"text": "x"}], "remasking": {"order": [[0], [1, 2]]}}),
    (ChatBody, {**CHAT, "response_format": {"type": "json_object"}}),
    (ChatBody, {**CHAT, "structured_outputs": {"regex": "[ab]+"}, "chat_template_kwargs": {"a": [1, None]}}),
    (ChatBody, {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
    (DecisionsBody, {"state": "s", "questions": {"q": {"instructions": "x", "criteria": ["a", "b"]}}}),
    (TokenizeBody, {"prompt": "aä"}),
]
WRONG: list[tuple[bytes, str]] = [
    (b"", "must be an object"),
    (b"null", "must be an object"),
    (b"[]", "must be an object"),
    (b"[1]", "must be an object"),
    (b"5", "must be an object"),
    (b"{", "is not JSON"),
    (b"nothing", "is not JSON"),
    (b"\xff", "is not JSON that can be read"),
    (b'{"prompt": 1}', "prompt"),
    (b'{"prompt": "a\\ud800"}', "not valid Unicode"),
    (b'{"prompt": "a", "temperature": "hot"}', "temperature must be a number from 0 to 1000, got 'hot'"),
    (b'{"prompt": "a", "tempeature": 1}', "Did you mean 'temperature'"),
    (b'{"prompt": "a", "n": 1.5}', "n"),
    (b'{"prompt": "a", "structured_outputs": {"regex": "(" , "json": {}}}', "structured_outputs"),
    (b'{"prompt": "a", "cache": 5}', "cache"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature must be a number from 0 to 1000, got nan"),
    (b"[" * 100_000, "nested more than 128 deep"),
    (b'{"prompt": ' + b"[" * 50_000, "nested more than 128 deep"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "is not JSON that can be read"),
]


@pytest.fixture(scope="module")
def readers() -> Any:
    made = BodyReaders(MOST)
    yield made
    made.close()


def read(readers: BodyReaders, model: Any, content: str) -> Any:
    return asyncio.run(readers.read("a client", model, content.encode("utf-8", "surrogatepass")))


def outcome(call: Callable[[], Any]) -> Any:
    """A body, or what the error is made of."""
    try:
        return call()
    except ApiError as error:
        return error.status, str(error), error.param, error.code


@pytest.mark.parametrize(("model", "fields"), RIGHT, ids=str)
def test_a_body_is_the_same_from_there(readers: BodyReaders, model: Any, fields: dict[str, Any]) -> None:
    content = json.dumps(fields)
    try:
        here = read_body(model, content.encode(), MOST)
    except ApiError as error:
        pytest.fail(f"the case is wrong: {error}")
    there = read(readers, model, content)
    assert type(there) is type(here)
    assert there == here
    assert there.model_fields_set == here.model_fields_set


def test_any_allowed_body_is_the_same_from_there(readers: BodyReaders) -> None:
    @settings(max_examples=40)
    @given(drawn("masked", ("none", "bicache+block-dual"), 256, usual=False))
    def check(fields: dict[str, Any]) -> None:
        content = json.dumps(fields)
        here = outcome(lambda: read_body(CompletionBody, content.encode(), MOST))
        assert outcome(lambda: read(readers, CompletionBody, content)) == here

    check()


@pytest.mark.parametrize(("content", "text"), WRONG, ids=[repr(content[:40]) for content, _ in WRONG])
def test_an_error_is_the_same_however_large_the_body(server: Running, content: bytes, text: str) -> None:
    padded = content + PAD.encode() if content else content  # blanks alone are no empty body
    small, large = (server.client.post(COMPLETIONS, content=each, headers=JSON) for each in (content, padded))
    error = small.json()["error"]
    assert (small.status_code, error["type"]) == (400, "invalid_request_error")
    assert text in error["message"]
    assert (large.status_code, large.json()) == (small.status_code, small.json())


def test_an_answer_is_the_same_however_large_the_body(server: Running) -> None:
    content = json.dumps({"prompt": "from ivy", "max_tokens": 8, "seed": 1})
    small, large = (server.client.post(COMPLETIONS, content=each, headers=JSON) for each in (content, content + PAD))
    assert large.status_code == 200
    assert large.json()["choices"] == small.json()["choices"]


def test_every_route_that_takes_a_body_reads_it_so() -> None:
    routes = [route for route in router().routes if isinstance(route, APIRoute)]
    assert any(route.body_field for route in routes)
    assert all(isinstance(route, BodyRoute) for route in routes if route.body_field)


def test_nobody_waits_for_a_large_body(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are answered while it is read, as long as that takes; other large ones wait for their turn."""
    begun, answered, ask = threading.Event(), threading.Event(), BodyReaders._read

    def asks(self: BodyReaders, *args: Any) -> Any:
        begun.set()
        assert answered.wait(LONGEST_S)
        return ask(self, *args)

    monkeypatch.setattr(BodyReaders, "_read", asks)
    content = json.dumps({"prompt": "a", "max_tokens": 4}) + PAD
    with ThreadPoolExecutor(3) as pool:
        large = [pool.submit(server.client.post, COMPLETIONS, content=content, headers=JSON) for _ in range(3)]
        try:
            assert begun.wait(LONGEST_S)
            eventually(lambda: server.service._open_bodies == 3)
            assert server.client.get("/ping").status_code == 200
            assert server.ask(max_tokens=4).status_code == 200
            assert not any(each.done() for each in large)
        finally:
            answered.set()
        assert [each.result().status_code for each in large] == [200] * 3


def test_no_more_large_bodies_wait_than_requests_may(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "_open_bodies", 10**6)
    told = server.client.post(COMPLETIONS, content=json.dumps({"prompt": "a"}) + PAD, headers=JSON)
    assert (told.status_code, told.json()["error"]["code"]) == (429, "queue_full")


def test_what_takes_too_long_is_a_413_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_SECONDS", 0.02)
    hasty = BodyReaders(1 << 26)
    try:
        endless = json.dumps({"prompt": [[1]] * 8192, "metadata": ["a"] * 3_000_000})
        with pytest.raises(ApiError, match=r"it takes more than 0.02 s of processor time") as refused:
            read(hasty, CompletionBody, endless)
        assert refused.value.status == 413
    finally:
        hasty.close()


@pytest.mark.thorough
def test_what_takes_too_much_memory_is_a_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BYTES", 1 << 30)
    small = BodyReaders(1 << 26)
    try:
        with pytest.raises(ApiError) as refused:
            read(small, CompletionBody, json.dumps({"prompt": "a", "metadata": [[]] * 12_000_000}))
        assert refused.value.status == 413
        assert read(small, CompletionBody, '{"prompt": "a"}').prompt == "a"
    finally:
        small.close()


def test_the_process_that_reads_imports_no_pytorch() -> None:
    """It would take hundreds of MB, and seconds before the first large body is read."""
    command = "import sys, remask.server.bodies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_each_client_waits_for_its_own_turn(readers: BodyReaders, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = []

    async def run(owner: str, _pool: Any, call: Callable[..., Any], *args: Any) -> Any:
        owners.append(owner)
        return call(*args)

    monkeypatch.setattr(readers._semaphore, "run", run)
    assert read(readers, CompletionBody, '{"prompt": "a"}').prompt == "a"
    assert owners == ["a client"]


def test_a_process_that_ended_is_replaced(readers: BodyReaders) -> None:
    assert read(readers, CompletionBody, '{"prompt": "a"}').prompt == "a"
    (worker,) = readers._helpers.idle
    worker.kill()
    worker.wait()
    assert read(readers, CompletionBody, '{"prompt": "b"}').prompt == "b"


def test_a_client_that_leaves_gives_its_turn_to_the_next(server: Running) -> None:
    content = json.dumps({"prompt": "a", "max_tokens": 4}) + PAD
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(COMPLETIONS, content=content, headers=JSON, timeout=httpx.Timeout(None, read=1e-4))
    assert server.client.post(COMPLETIONS, content=content, headers=JSON).status_code == 200
    eventually(lambda: server.service._open_bodies == 0)
