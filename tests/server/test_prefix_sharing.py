"""Shared prefixes that no client names, on a real server."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.serving import CHATS, URL, Running, make_llm, serving

COMPLETIONS = "/v1/completions"
FIELDS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "cache": "bicache", "cache_config": {"depth": 4}}
HEAD = list(range(20, 120))


@pytest.fixture(scope="module")
def auto() -> Iterator[Running]:
    with serving(make_llm(prefix_sharing="auto", prefix_min=32)) as running:
        yield running


def told(server: Running, prompt: Any, **fields: Any) -> tuple[int, int]:
    """Length of the prefix that was read, and of what was stored before."""
    body = server.answer(COMPLETIONS, {**FIELDS, "prompt": prompt, **fields})
    return body["remask"]["prefix_tokens"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_completions_share_what_they_have_in_common(auto: Running) -> None:
    before = auto.cache()["found"]
    assert [told(auto, [*HEAD, tail, 5]) for tail in (1, 2, 3)] == [(0, 0), (100, 0), (100, 100)]
    assert told(auto, [*HEAD, 4, 5], prefix_length=0) == (0, 0)
    assert told(auto, [*HEAD, 5, 5], prefix_length=40) == (40, 0)
    assert told(auto, [*HEAD, 6, 5], cache_salt="another") == (0, 0)
    auto.settle()
    now = auto.cache()
    assert now["found"] - before == 2
    assert now["recent"]["prompts"] >= 4
    assert "remask:prefix_store_found_total" in auto.client.get("/metrics").text


def test_texts_share_too_and_in_one_body(auto: Running) -> None:
    text = CHATS[0][0]["content"]
    prompts = [f"{text} from {name}" for name in ("ivy", "oak", "elm")]
    body = {**FIELDS, "prompt": prompts, "cache_salt": "texts", "seed": 1}
    first = auto.client.post(COMPLETIONS, json=body).json()
    assert first["remask"]["prefix_tokens"] > 100
    auto.settle()
    again = auto.client.post(COMPLETIONS, json={**body, "prompt": prompts[2]}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["remask"]["prefix_tokens"] > 100


def test_a_trace_names_what_was_read(auto: Running) -> None:
    body = {**FIELDS, "cache_salt": "traces", "return_trace": True}
    asked = [{**body, "prompt": [*HEAD, tail, 5]} for tail in (1, 2)]
    answers = [auto.client.post(COMPLETIONS, json=each).json() for each in asked]
    trace = answers[1]["choices"][0]["remask"]["trace"]
    assert trace["prefix_length"] == answers[1]["remask"]["prefix_tokens"] == 100


def test_what_is_shared_is_said_once(auto: Running) -> None:
    marked = {"role": "system", "content": "from ivy", "cache_control": {"type": "ephemeral"}}
    chat = {**FIELDS, "messages": [marked, CHATS[0][1]], "prefix_length": 2}
    assert "prefix_length and cache_control both say" in auto.refusal(URL, chat)["message"]


def test_who_reads_no_prefix_is_told_why_and_counted(server: Running) -> None:
    """In every form of answer; and who brings a prefix is told what its pass took."""
    system, user = CHATS[0]
    server.client.delete("/v1/cache")
    before = server.cache()["unread"]
    layers = server.service.llm.loaded.config.layers
    first, again, bare, none, short, salted = (
        server.chat({"messages": messages, "max_tokens": 4, **fields}).json()["remask"]
        for messages, fields in (
            ([system, user], {}),
            ([system, user], {}),
            ([user], {}),
            ([system, user], {"cache": "none"}),
            ([user], {"prefix_length": 1, "max_tokens": 128}),
            ([system, user], {"cache_salt": "mine"}),
        )
    )
    assert first["prefix_row_layers"] == first["prefix_tokens"] * layers > 0 == again["prefix_row_layers"]
    assert "prefix_note" not in first
    assert "prefix_note" not in again
    assert "no turn stands before the last user turn" in bare["prefix_note"]
    assert none["prefix_note"] == "the cache policy reads no shared prefix"
    assert "of the canvas: audits have not proven yet that one may" in short["prefix_note"]
    assert "nothing of this cache_salt is stored yet" in salted["prefix_note"]
    assert [each.get("approximation") for each in (first, again, bare, none, short, salted)] == [
        "bicache",
        "bicache",
        None,
        None,
        None,
        "bicache",
    ]
    now = server.cache()["unread"]
    assert {reason: now[reason] - before.get(reason, 0) for reason in now if now[reason] != before.get(reason)} == {
        "nothing": 1,
        "policy": 1,
        "depth": 1,
        "salt": 1,
    }
    assert f'reason="depth"}} {now["depth"]}.0' in server.client.get("/metrics").text
    for path, body in (("/v1/messages", {"messages": [user]}), ("/v1/responses", {"input": user["content"]})):
        told = server.client.post(path, json={**body, "max_tokens" if "messages" in path else "max_output_tokens": 4})
        assert "no turn stands before" in told.json()["remask"]["prefix_note"]
