"""Responses with fixed parts over HTTP: suffixes and canvases, whole and streamed."""

from typing import Any

import openai
import pytest

from tests.server.serving import CHATS, Running

URL = "/v1/completions"
PROMPT = "abbey > acorn ; acorn > abbey ; from abbey"
CANVAS: list[dict[str, Any]] = [{"text": "go"}, {"mask": {"min": 1, "max": 4}}, {"text": " alder"}, {"mask": 2}]


def complete(running: Running, **fields: Any) -> dict[str, Any]:
    return running.answer(URL, {"prompt": PROMPT, "return_token_ids": True, **fields})


def joined(running: Running, **fields: Any) -> tuple[str, list[int], dict[str, Any]]:
    """Text and tokens of a stream, and its last choice."""
    chunks = running.stream({"prompt": PROMPT, "return_token_ids": True, **fields}, URL)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    return "".join(choice["text"] for choice in choices), tokens, choices[-1]


def tokens_of(running: Running, text: str) -> list[int]:
    tokenizer = running.service.intake.tokenizer
    return tokenizer.encode(text, add_special_tokens=False)


def test_the_text_of_a_suffix_request_is_the_fill(client: openai.OpenAI, server: Running) -> None:
    answer = client.completions.create(model="bundled-transit", prompt=PROMPT, suffix=" arch ; alder", max_tokens=6)
    whole = complete(server, suffix=" arch ; alder", max_tokens=6)
    (choice,) = whole["choices"]
    assert answer.choices[0].text == choice["text"]
    assert "holes" not in choice
    assert len(choice["token_ids"]) == 6, "padding keeps its place"
    assert choice["finish_reason"] in ("stop", "length")
    suffix, prompt = tokens_of(server, " arch ; alder"), len(choice["prompt_token_ids"])
    assert whole["usage"]["prompt_tokens"] == prompt + len(suffix)
    assert whole["usage"]["completion_tokens"] == 6
    told = joined(server, suffix=" arch ; alder", max_tokens=6)
    assert told[:2] == (choice["text"], choice["token_ids"])
    canvas = complete(server, canvas=[{"mask": {"max": 6}}, {"text": " arch ; alder"}])["choices"][0]
    assert canvas["holes"] == [choice["text"]]
    assert canvas["text"] == choice["text"] + " arch ; alder"
    assert canvas["token_ids"] == choice["token_ids"] + suffix


def test_an_empty_suffix_asks_for_nothing(server: Running) -> None:
    plain = complete(server, max_tokens=4)["choices"]
    assert complete(server, max_tokens=4, suffix="")["choices"] == plain


@pytest.mark.parametrize("cache", ["none", "block-dual", "dkv-decode", "bicache"])
def test_a_canvas_is_filled_and_streamed(server: Running, cache: str) -> None:
    fields = {"canvas": CANVAS, "cache": cache, "block_length": 4}
    (choice,) = complete(server, **fields)["choices"]
    first, second = choice["holes"]
    assert choice["text"] == f"go{first} alder{second}"
    places = [*tokens_of(server, "go"), *[None] * 4, *tokens_of(server, " alder"), *[None] * 2]
    assert [
        have if want is not None else None for have, want in zip(choice["token_ids"], places, strict=True)
    ] == places
    text, tokens, last = joined(server, **fields)
    assert (text, tokens, last["holes"]) == (choice["text"], choice["token_ids"], choice["holes"])
    assert last["finish_reason"] == choice["finish_reason"]


def test_chat_takes_it_as_the_assistants_template(client: openai.OpenAI, server: Running) -> None:
    messages: Any = CHATS[0]
    answer = client.chat.completions.create(
        model="bundled-transit", messages=messages, extra_body={"canvas": CANVAS}, n=2, temperature=1.0
    )
    for choice in answer.choices:
        assert choice.model_extra is not None
        first, second = choice.model_extra["holes"]
        assert choice.message.content == f"go{first} alder{second}"
    body = {"messages": messages, "canvas": CANVAS}
    chunks = server.stream(body)
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == server.chat(body).json()["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["holes"] == server.chat(body).json()["choices"][0]["holes"]


def test_log_probabilities_and_step_maps_are_of_what_was_filled(server: Running) -> None:
    (choice,) = complete(server, canvas=CANVAS, logprobs=1, return_step_maps=True)["choices"]
    fixed = [token for text in ("go", " alder") for token in tokens_of(server, text)]
    steps = choice["remask"]["step_maps"]
    assert len(steps) == len(choice["token_ids"]) == 6 + len(fixed)
    assert steps.count(0) == len(fixed)
    assert sorted(step for step in steps if step) == sorted(step + 1 for step in choice["logprobs"]["steps"])
    assert len(choice["logprobs"]["tokens"]) == 6
    assert choice["logprobs"]["text_offset"][0] == len("go")
    (fill,) = complete(server, suffix=" arch", max_tokens=3, logprobs=1, return_step_maps=True)["choices"]
    assert len(fill["token_ids"]) == len(fill["remask"]["step_maps"]) == len(fill["logprobs"]["tokens"]) == 3


def test_drafts_show_what_is_fixed(server: Running) -> None:
    chunks = server.stream({"messages": CHATS[0], "canvas": CANVAS, "stream_drafts": True, "block_length": 1})
    blocks = next(chunk["remask"]["blocks"][0] for chunk in chunks if "blocks" in chunk.get("remask", {}))
    shown = next(chunk["remask"]["canvas"] for chunk in chunks if "canvas" in chunk.get("remask", {}))
    assert [place for start, stop in blocks for place in range(start, stop)] == list(range(len(shown)))
    fixed = tokens_of(server, "go") + tokens_of(server, " alder")
    assert [place["token_id"] for place in shown if place["settled"] == -1] == fixed


def test_long_parts_are_refused_before_they_are_read(server: Running) -> None:
    most = server.service.intake.max_prompt_chars
    for fields in ({"suffix": "x" * (most + 1)}, {"canvas": [{"mask": 1}, {"text": "x" * (most + 1)}]}):
        assert "characters" in server.refusal(URL, {"prompt": PROMPT, **fields})["message"]
