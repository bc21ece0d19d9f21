"""Every object that is sent has OpenAI's keys, as its own client library declares them, and no others but `remask`."""

from itertools import pairwise
from typing import Any

import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.server.serving import CHATS, Running

CHAT = {"messages": CHATS[0], "logprobs": True}
TEXT = {"prompt": "from abbey go 1", "max_tokens": 4, "logprobs": 0}
TEXT_URL = "/v1/completions"
LOGPROBS = {"tokens", "token_logprobs", "top_logprobs", "text_offset", "steps"}


def keys(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def required(model: type[BaseModel]) -> set[str]:
    return {name for name, field in model.model_fields.items() if field.is_required()}


def check(value: Any, model: type[BaseModel]) -> None:
    """All required keys, no unknown ones, and values that the strict model takes."""
    own = {key: each for key, each in value.items() if key != "remask"}
    assert required(model) <= own.keys() <= keys(model)
    model.model_validate(own, strict=True)


def test_a_chat_answer(server: Running) -> None:
    told = server.chat(CHAT).json()
    check(told, ChatCompletion)
    assert told["object"] == "chat.completion"
    assert set(told["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}
    assert set(told["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert set(told["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    assert set(told["remask"]) == {"steps", "forwards", "row_layers", "prefix_depth", "prefix_tokens"}


@pytest.mark.parametrize("counted", [False, True])
def test_chat_chunks(server: Running, counted: bool) -> None:
    chunks = server.stream({**CHAT, "stream_options": {"include_usage": counted}})
    plain = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    for chunk in chunks:
        check(chunk, ChatCompletionChunk)
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk.keys() - {"remask"} == (plain | {"usage"} if counted else plain)
        assert ("remask" in chunk) == (counted and chunk is chunks[-1])
        assert [set(choice) for choice in chunk["choices"]] in (
            [],
            [{"index", "delta", "logprobs", "finish_reason"}],
        )
    assert len({chunk["id"] for chunk in chunks}) == 1
    body = chunks[:-1] if counted else chunks
    assert body[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in body[1:-1])
    assert body[-1]["choices"][0]["delta"] == {}
    if counted:
        assert chunks[-1]["choices"] == []
        check(chunks[-1]["usage"], CompletionUsage)


def test_a_text_answer_and_its_chunks(server: Running) -> None:
    told = server.client.post(TEXT_URL, json=TEXT).json()
    check(told, Completion)
    assert told["object"] == "text_completion"
    assert set(told["choices"][0]["logprobs"]) == LOGPROBS
    chunks = server.stream({**TEXT, "stream_options": {"include_usage": True}}, TEXT_URL)
    for chunk in chunks[:-1]:
        assert set(chunk["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
        assert chunk["usage"] is None
    for chunk in chunks:
        assert required(Completion) <= chunk.keys() <= keys(Completion) | {"remask"}
    assert chunks[-1]["usage"]["completion_tokens"] == told["usage"]["completion_tokens"]


def test_drafts_show_the_whole_canvas_step_by_step(server: Running) -> None:
    body = {"messages": CHATS[0], "stream_drafts": True, "ignore_eos": True}
    chunks = server.stream(body)
    prompt = next(chunk["remask"]["prompts"][0] for chunk in chunks if "prompts" in chunk.get("remask", {}))
    assert len(prompt) == server.ask().json()["usage"]["prompt_tokens"]
    layouts = [chunk["remask"]["blocks"] for chunk in chunks if "blocks" in chunk.get("remask", {})]
    assert layouts == [[[[place, place + 2] for place in range(0, 16, 2)]]]
    shown = [chunk["remask"] for chunk in chunks if "canvas" in chunk.get("remask", {})]
    assert [each["step"] for each in shown] == list(range(8))
    for each in shown:
        assert len(each["canvas"]) == 16
        assert all(set(place) == {"token_id", "text", "settled"} for place in each["canvas"])
    for before, after in pairwise(shown):
        for old, new in zip(before["canvas"], after["canvas"], strict=True):
            assert old["settled"] is None or old == new, "what is settled stays"
    assert sorted(place["settled"] for place in shown[-1]["canvas"]) == [step for step in range(8) for _ in range(2)]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == server.chat({"messages": CHATS[0], "ignore_eos": True}).json()["choices"][0]["message"]["content"]


def test_drafts_come_before_anything_settles_in_a_long_block(server: Running) -> None:
    body = {"messages": CHATS[0], "stream_drafts": True, "block_length": 16, "steps": 16}
    shown = [chunk["remask"]["canvas"] for chunk in server.stream(body) if "canvas" in chunk.get("remask", {})]
    assert all(place["token_id"] is not None for place in shown[0])
    assert sum(place["settled"] is None for place in shown[0]) == 15
