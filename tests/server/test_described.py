"""Real answers against the OpenAPI document: every path, every kind of event, and every key that it tells of is sent.

All servers of these tests judge what their client gets in the same way (`tests/server/serving.py`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.server.described import Described, events
from tests.server.serving import CHATS, Running, held, make_llm, serving
from tests.server.test_decisions import STATE, question
from tests.server.test_infill import CANVAS, PROMPT
from tests.server.test_messages_api import OTHER, TOOL
from tests.server.test_responses_api import BUYS, STOPS
from tests.server.test_tools import ASK, BUY, NAMED, ORDER, STOP, saying
from tests.waiting import Clock, eventually

ORDERS = Path(__file__).with_name("key_orders.json")
STREAMS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
ALL = {
    "n": 2,
    "max_tokens": 8,
    "block_length": 8,
    "steps": 8,
    "temperature": 0.0,
    "return_token_ids": True,
    "return_step_maps": True,
    "return_trace": True,
    "seed": 1,
    "top_logprobs": 1,
}
TOLD = {"stream_options": {"include_usage": True}, "stream_drafts": True}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True}
SHARED = {"prefix_length": 4, "return_trace": True, "cache": "reuse"}
# What takes another kind of model, another rule, or decisions over a prefix that the store has no room for.
RARE = {
    ("Work", "correction_steps"),
    ("WrittenStep", "edits"),
    *(("ReadWork", key) for key in ("correction_steps", "left_out", "prefix_note")),
}


class Recorded(Described):
    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document)
        self.first: dict[tuple[str, str, int, str], Any] = {}
        self.sent: set[tuple[str, str]] = set()
        """Keys of answers, with the names of their objects in the document."""
        self.orders: dict[str, set[tuple[str, ...]]] = {}
        """The keys of each such object in the order in which they were sent."""
        self._branches: dict[str, Any] = {}

    def validate(self, place: tuple[str, str, int, str], value: Any) -> None:
        super().validate(place, value)
        self.first.setdefault(place, value)
        method, path, status, kind = place
        told = self.document["paths"][path][method]["responses"][str(status)]["content"][kind]["schema"]
        self._walk(told, value)

    def _walk(self, schema: dict[str, Any], value: Any) -> None:
        for each in schema.get("anyOf", ()):
            if self._fits(json.dumps(each), value):
                self._walk(each, value)
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            self.sent |= {(name, key) for key in value}
            self.orders.setdefault(name, set()).add(tuple(value))
            self._walk(self.document["components"]["schemas"][name], value)
        if isinstance(value, list):
            for each in value:
                self._walk(schema.get("items", {}), each)
        elif isinstance(value, dict):
            others = schema.get("additionalProperties")
            for key, each in value.items():
                self._walk(schema.get("properties", {}).get(key, others if isinstance(others, dict) else {}), each)

    def _fits(self, schema: str, value: Any) -> bool:
        if schema not in self._branches:
            whole = {**json.loads(schema), "components": self.document["components"]}
            self._branches[schema] = jsonschema_rs.validator_for(whole)
        fits: bool = self._branches[schema].is_valid(value)
        return fits


class Asking:
    """A client of one server. What it gets is judged; streams are read to their end."""

    def __init__(self, judge: Described, running: Running) -> None:
        self.judge, self.running = judge, running

    def __call__(self, method: str, path: str, status: int = 200, **sent: Any) -> Any:
        response = self.running.client.request(method, path, **sent)
        assert response.status_code == status, response.text
        self.judge.check(response)
        return response

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        return self("POST", path, status, json=body)

    def both(self, path: str, body: dict[str, Any]) -> None:
        self.post(path, body)
        streamed = self.post(path, {**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert [*events(streamed.text)]


def ask_for_text(ask: Asking, taught: Asking) -> None:
    chat, text = {"messages": CHATS[0][1:]}, {"prompt": PROMPT}
    for path, body, named in (
        ("/v1/chat/completions", chat, {"logprobs": True}),
        ("/v1/completions", text, {"logprobs": 1}),
    ):
        ask.both(path, {**body, "max_tokens": 4})
        ask.post(path, {**body, **ALL, **named})
        ask.post(path, {**body, **ALL, **TOLD, **named, "stream": True})
        ask.post(path, {**body, "max_tokens": 4, **COUNTED})
        ask.both(path, {**body, "canvas": CANVAS, "block_length": 4})
    ask.both("/v1/fim/completions", {**text, "suffix": " alder", "max_tokens": 4})
    ask.post("/v1/completions", {**text, **SHARED})
    for tools, choice in (([BUY, STOP], NAMED), ([STOP], "required")):
        taught.both("/v1/chat/completions", {**ASK, "tools": tools, "tool_choice": choice, "seed": 5})
    call = '<tool_call>{"name": "buy", "arguments": {}}</tool_call>'
    with saying(taught.running, f"Sure. {call}"):
        taught.both("/v1/chat/completions", {"messages": ASK["messages"], "tools": [BUY, STOP]})
        taught.both("/v1/responses", {"input": "Buy it", "tools": [BUYS, STOPS]})
        tools = [{**TOOL, "description": "Buys."}, OTHER]
        taught.both("/v1/messages", {"messages": ASK["messages"], "max_tokens": 8, "tools": tools})
    ask_for_responses(taught)
    ask_for_messages(taught)


def ask_for_responses(taught: Asking) -> None:
    form = {"type": "json_schema", "name": "a", "description": "b", "strict": True, "schema": ORDER}
    tools = [BUYS, STOPS]
    bodies: list[dict[str, Any]] = [
        {"max_output_tokens": 4, "ignore_eos": True},
        {"max_output_tokens": 8, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "user": "me"},
        {
            "max_output_tokens": 64,
            "block_length": 64,
            "steps": 8,
            "text": {"format": form},
            "instructions": "Be brief.",
        },
        {"max_output_tokens": 8, "tools": [STOPS], "tool_choice": "required"},
        {"max_output_tokens": 8, "tools": tools, "tool_choice": {"type": "function", "name": "stop"}},
    ]
    for body in bodies:
        taught.both("/v1/responses", {"input": "Buy it", **body})


def ask_for_messages(taught: Asking) -> None:
    hello, tools = ASK["messages"], [{**TOOL, "description": "Buys."}, OTHER]
    bodies: list[dict[str, Any]] = [
        {"max_tokens": 8, "ignore_eos": True},
        {"max_tokens": 8, "stop_sequences": ["a", "e", "t"]},
        {"max_tokens": 8, "tools": tools, "tool_choice": {"type": "tool", "name": "stop"}},
    ]
    for body in bodies:
        taught.both("/v1/messages", {"messages": hello, **body})
    hosted = [{"type": "web_search_20250305", "name": "web_search"}]
    taught.post("/v1/messages", {"messages": hello, "max_tokens": 4, "tools": hosted})
    taught.post("/v1/messages/count_tokens", {"messages": hello, "tools": tools})


def ask_for_reads(ask: Asking) -> None:
    asked: dict[str, Any] = {str(number): question(number) for number in range(2)}
    for number, kind in enumerate(("yes_no", "noul")):
        asked[kind] = {"type": kind, "instructions": f"Is it {number}?", "labels": ["1", "0"]}
    asked["number"] = {"type": "number", "instructions": "How many?", "min": 1, "max": 3}
    asked["score"] = {"type": "score", "instructions": "How good?", "criteria": ["bad", "good"], "labels": ["1", "2"]}
    for path in ("/v1/decisions", "/v1/systemone"):
        ask.post(path, {"state": STATE, "questions": asked, "end_turn": False})
    listed = [{**each, "name": name} for name, each in asked.items() if name in ("0", "noul", "number", "score")]
    ask.post("/v1/decisions", {"input": STATE, "questions": listed, "end_turn": False})
    pair = {"documents": ["oak > elm", "elm > oak"], "labels": ["1", "0"]}
    for path in ("/v1/score", "/score"):
        ask.post(path, {**pair, "queries": "oak"})
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        ask.post(path, {**pair, "query": "oak"})


def ask_for_information(ask: Asking) -> None:
    tokens = ask.post("/tokenize", {"prompt": "abbey"}).json()["tokens"]
    ask.post("/tokenize", {"messages": CHATS[0]})
    ask.post("/detokenize", {"tokens": tokens})
    ask.post("/v1/chat/completions/render", {"messages": CHATS[0]})
    ask.post("/v1/completions/render", {"prompt": "abbey"})
    for path in (
        "/v1/models",
        "/v1/models/bundled-transit",
        "/health",
        "/ping",
        "/live",
        "/ready",
        "/metrics",
        "/version",
    ):
        ask("GET", path)
    ask.post("/ping")
    ask("GET", "/get_model_info")
    ask("GET", "/playground/example")
    for messages in CHATS[:2]:
        ask.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
        ask.running.settle()  # audits included
    entry = ask("GET", "/v1/cache").json()["entries"][0]["prefix_id"]
    ask("DELETE", f"/v1/cache/{entry}")
    ask("DELETE", "/v1/cache")


def ask_the_playground(ask: Asking) -> None:
    url = f"/playground/pages/{ask.post('/playground/pages').json()['session']}"
    for shared in (True, True, False):
        ask.post(f"{url}/requests", {"shared_prefix": shared})
    ask.post(f"{url}/step")
    ask("GET", url)
    ask("DELETE", f"{url}/requests/1")
    ask.post(f"{url}/requests", {"shared_prefix": False})
    ask.post(f"{url}/requests", {"shared_prefix": False}, 409)
    ask.post(f"{url}/requests", {"shared_prefix": 1}, 400)
    ask.post(f"{url}/caching", {"enabled": False})
    ask("DELETE", f"{url}/requests/9", 404)
    ask("DELETE", url)
    ask("GET", url, 404)


def ask_for_errors(ask: Asking, one: Asking) -> None:
    """Of a server, and of one with a key that takes one request at a time."""
    reads = {"/v1/decisions", "/v1/systemone", "/v1/score", "/v1/rerank"}
    for path in sorted(STREAMS | reads | {"/tokenize", "/detokenize"}):
        wrong = 422 if path == "/v1/systemone" else 400
        ask.post(path, {"unknown": 1}, wrong)
        ask("POST", path, wrong, content=b"{")
        one("POST", path, 413, content=b" " * 5000)
        one("POST", path, 401, json={}, headers={"Authorization": "Bearer other"})
        ask("POST", path, 403, json={}, headers={"Host": "elsewhere.example"})
    texts: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": CHATS[0][1:]},
        "/v1/completions": {"prompt": "abbey"},
        "/v1/responses": {"input": "abbey"},
        "/v1/messages": {"messages": [{"role": "user", "content": "abbey"}], "max_tokens": 8},
    }
    for path, body in texts.items():
        ask.post(path, {**body, "model": "unknown"}, 404)
    ask("GET", "/v1/models/unknown", 404)
    ask("DELETE", "/v1/cache/unknown", 404)
    with held(one.running), one.running.post("/v1/completions", {"prompt": "abbey", "max_tokens": 8}):
        eventually(lambda: one.running.open)
        for path, body in texts.items():
            one.post(path, {**body, "stream": True}, 429)
    one.running.settle()
    engine = one.running.service.llm.engine
    before, engine.clock = engine.clock, Clock(tick=1.0)
    late = {"deadline_s": 20, "max_tokens": 64, "block_length": 1, "steps": 64, "ignore_eos": True, "stream": True}
    for path, body in texts.items():
        told = [*events(one.post(path, {**body, **late}).text)]
        assert len(told) > 1, "it had begun"
        assert "error" in told[-1]
    engine.clock = before


@pytest.fixture(scope="module")
def judged(_shared: Running, taught: Running) -> Iterator[Recorded]:
    """Whatever this file asks for, answered and judged."""
    small = make_llm(max_num_seqs=1)
    with serving(small, max_queue=0, max_body_bytes=4096, api_keys=["s3cret"]) as full:
        judge = Recorded(_shared.document.document)
        ask, tools, one = (Asking(judge, each) for each in (_shared, taught, full))
        ask_for_text(ask, tools)
        ask_for_reads(ask)
        ask_for_information(ask)
        ask_the_playground(ask)
        ask_for_errors(ask, one)
        yield judge


def told(document: dict[str, Any]) -> set[tuple[str, str]]:
    """Method and path of every endpoint of a document."""
    return {(method, path) for path, operations in document["paths"].items() for method in operations}


@pytest.mark.thorough
def test_every_endpoint_has_answered_and_every_stream(judged: Recorded) -> None:
    fine = {(method, path, kind) for method, path, status, kind in judged.seen if status == 200}
    assert {(method, path) for method, path, _ in fine} == told(judged.document)
    assert {path for _, path, kind in fine if kind == "text/event-stream"} == STREAMS


def named(schema: Any, document: dict[str, Any], found: set[str]) -> None:
    """Add to `found` the names of all objects that `schema` leads to."""
    if isinstance(schema, list):
        for each in schema:
            named(each, document, found)
    elif isinstance(schema, dict):
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found.add(name)
            named(document["components"]["schemas"][name], document, found)
        named([*schema.values()], document, found)


def test_every_key_that_is_told_is_sent(judged: Recorded) -> None:
    document, objects = judged.document, set[str]()
    for operations in document["paths"].values():
        named([operation["responses"] for operation in operations.values()], document, objects)
    keys = {(name, key) for name in objects for key in document["components"]["schemas"][name]["properties"]}
    assert len(keys) > 300
    assert keys - judged.sent == RARE


def test_keys_are_sent_in_the_order_that_clients_have_seen(judged: Recorded) -> None:
    told = {name: sorted(map(" ".join, orders)) for name, orders in sorted(judged.orders.items())}
    assert told == json.loads(ORDERS.read_text())


def judge_all(document: dict[str, Any], recorded: Recorded) -> None:
    judge = Described(document)
    for place, value in recorded.first.items():
        judge.validate(place, value)


def test_a_document_that_lies_is_found_out(judged: Recorded) -> None:
    for name, lie in (("Usage", {"total_tokens": {"type": "string"}}), ("SystemOneDecision", {}), ("Error", {})):
        document = json.loads(json.dumps(judged.document))
        document["components"]["schemas"][name]["properties"] = lie
        with pytest.raises(AssertionError):
            judge_all(document, judged)
