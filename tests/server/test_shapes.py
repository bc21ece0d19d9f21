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


def keys(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def required(model: type[BaseModel]) -> set[str]:
    return {name for name, field in model.model_fields.items() if field.is_required()}


def check(value: Any, model: type[BaseModel]) -> None:
    """All required keys, no unknown ones, and values that the strict model takes."""
    own = {key: each for key, each in value.items() if key != "remask"}
    assert required(model) <= own.keys() <= keys(model)
    model.model_validate(own, strict=True)


@pytest.mark.parametrize("counted", [False, True])
def test_openais_own_types_take_them(server: Running, counted: bool) -> None:
    """Which keys there are, and in which order, `test_described.py` holds."""
    check(server.chat(CHAT).json(), ChatCompletion)
    check(server.client.post(TEXT_URL, json=TEXT).json(), Completion)
    more = {"stream_options": {"include_usage": counted}}
    chunks = server.stream({**CHAT, **more})
    for chunk in chunks:
        check(chunk, ChatCompletionChunk)
    assert len({chunk["id"] for chunk in chunks}) == 1
    texts = server.stream({**TEXT, **more}, TEXT_URL)
    for chunk in texts:
        assert required(Completion) <= chunk.keys() <= keys(Completion) | {"remask"}
    for told in (chunks, texts):
        assert all(("usage" in chunk) == counted for chunk in told)
        if counted:
            assert [chunk["usage"] for chunk in told[:-1]] == [None] * (len(told) - 1)
            check(told[-1]["usage"], CompletionUsage)


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


GROWING = {"blocks": {"growing_canvas": True}, "block_length": 2, "steps_per_block": 2, "ignore_eos": True}


def test_a_stream_and_its_drafts_come_to_the_one_shot_answer(server: Running) -> None:
    body = {"messages": CHATS[0], "max_tokens": 6, **GROWING}
    answer = server.chat(body).json()
    assert answer["usage"]["completion_tokens"] == 6
    chunks = server.stream({**body, "stream_drafts": True})
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])
    assert text == answer["choices"][0]["message"]["content"]
    drawn = [each["remask"] for each in chunks if "canvas" in each.get("remask", {})]
    assert [draft["step"] for draft in drawn] == list(range(6))
    for draft in drawn:  # nothing is predicted beyond the block
        known = [place for place, token in enumerate(draft["canvas"]) if token["token_id"] is not None]
        assert max(known) == draft["step"] // 2 * 2 + 1


@pytest.mark.parametrize(
    "parts",
    [{"canvas": [{"mask": 2}, {"text": " arch"}]}, {"suffix": " arch", "max_tokens": 5}],
    ids=["canvas", "suffix"],
)
def test_beside_parts_of_a_canvas_it_is_refused(server: Running, parts: dict[str, Any]) -> None:
    found = server.refusal("/v1/completions", {"prompt": "from abbey", **GROWING, **parts})
    assert "growing_canvas: a canvas that grows has nothing behind what is decoded" in found["message"]
