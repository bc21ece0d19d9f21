"""Log-probabilities, traces and step maps over HTTP."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from remask.request.sampling_params import SamplingParams
from remask.tasks import transit
from tests.server.serving import CHATS, Running, bundled, make_llm, serving
from tests.server.test_kinds_served import sdar

URL = "/v1/completions"
PROMPT = "abbey > acorn ; acorn > abbey ; from abbey"
DRAWN: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 1.5, "cache": "none"}


def complete(running: Running, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = running.answer(URL, {**DRAWN, **fields})["choices"][0]
    return choice


def test_chat_logprobs_are_the_engines(client: openai.OpenAI) -> None:
    llm = make_llm()
    (output,) = llm.generate(CHATS[:1], SamplingParams.from_mapping(transit.SAMPLING), top_logprobs=3)
    assert output.logprobs is not None
    tokenizer = llm.tokenizer
    assert tokenizer is not None

    def word(token: int, place: int) -> str:
        """A word, with the space before it; the names of special tokens are no part of the text."""
        text = tokenizer.decode([token], skip_special_tokens=False)
        return f" {text}" if place and token not in tokenizer.special_ids else text

    messages: Any = CHATS[0]
    fields: dict[str, Any] = {"model": "bundled-transit", "messages": messages, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**fields).choices[0].logprobs
    assert whole is not None
    streamed = [
        item
        for chunk in client.chat.completions.create(**fields, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for item in choice.logprobs.content or []
    ]
    for items in (whole.content or [], streamed):
        assert bytes(byte for item in items for byte in item.bytes or ()).decode() == output.text
        for place, (item, read) in enumerate(zip(items, output.logprobs, strict=True)):
            assert item.token == word(read.token_id, place)
            assert item.logprob == pytest.approx(read.logprob, abs=1e-4)
            assert item.model_extra == {"step": read.step}
            assert [top.logprob for top in item.top_logprobs] == pytest.approx([p for _, p in read.top], abs=1e-4)
            assert [top.token for top in item.top_logprobs] == [word(token, place) for token, _ in read.top]
            assert item.logprob <= 0


def test_completions_list_the_chosen_token_too(server: Running) -> None:
    read = complete(server, logprobs=2, seed=4)["logprobs"]
    assert read["steps"] == complete(server, logprobs=0, seed=4)["logprobs"]["steps"]
    assert complete(server, logprobs=0, seed=4)["logprobs"]["top_logprobs"] is None
    for token, logprob, top in zip(read["tokens"], read["token_logprobs"], read["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_a_trace_holds_all_that_its_run_depended_on(server: Running) -> None:
    fields: dict[str, Any] = {"seed": 9, "return_trace": True, "return_step_maps": True, "block_length": 4, "steps": 4}
    first, second = (complete(server, **fields) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    trace, steps = first["remask"]["trace"], first["remask"]["step_maps"]
    assert trace["cache"] == "none"
    assert trace["sampling"] == {
        "max_tokens": 8,
        "steps": 4,
        "block_length": 4,
        "temperature": 1.5,
        "seed": 9,
        "ignore_eos": True,
    }
    assert sorted(p for event in trace["events"] for p in event["positions"]) == list(range(8))
    for event in trace["events"]:
        assert [steps[place] for place in event["positions"]] == [event["step"] + 1] * len(event["positions"])
        assert all(value < 0 for value in event["logprobs"])
    kept = {name: trace[name] for name in ("cache", "cache_config", "prefix_length")}
    body = {"prompt": PROMPT, **kept, "sampling": trace["sampling"], "return_trace": True}
    again = server.client.post(URL, json=body).json()["choices"][0]
    assert json.dumps(again["remask"]["trace"]) == json.dumps(trace)
    assert again["text"] == first["text"]
    assert again["finish_reason"] == first["finish_reason"] == "length"


def test_a_trace_without_a_seed_says_which_was_drawn(server: Running) -> None:
    choice = complete(server, return_trace=True)
    trace = choice["remask"]["trace"]
    again = complete(server, seed=trace["sampling"]["seed"], return_trace=True)
    assert again["remask"]["trace"] == trace


def test_a_chat_has_as_many_steps_as_tokens(server: Running) -> None:
    whole = server.ask(return_trace=True, return_step_maps=True, return_token_ids=True)
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["remask"]["step_maps"]) == len(choice["token_ids"]) == whole.json()["usage"]["completion_tokens"]


def test_streams_end_with_the_rollout(server: Running) -> None:
    body = {**DRAWN, "seed": 2, "return_trace": True, "return_step_maps": True, "return_token_ids": True}
    whole = server.client.post(URL, json=body).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in server.stream(body, URL)]
    assert choices[-1]["remask"] == whole["remask"]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    chat = {"messages": CHATS[0], "return_token_ids": True}
    told = server.chat(chat).json()
    chunks = server.stream(chat)
    assert chunks[1]["prompt_token_ids"] == told["prompt_token_ids"]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == told["choices"][0]["token_ids"]


def test_a_uniform_model_tells_its_trace_alone() -> None:
    small = {"uniform": {"canvas_length": 64}, "steps_per_block": 8}
    body = {"prompt": "route from Cairo?", "max_tokens": 8, "seed": 3, **small}
    with serving(bundled("uniform", "auto"), model_names=["uniform"], sampling={}) as running:
        for name, value in {"return_step_maps": True, "logprobs": 0, "top_logprobs": 2}.items():
            assert "uniform model" in running.refusal(URL, {**body, name: value})["message"]
        trace = running.answer(URL, {**body, "return_trace": True})["choices"][0]["remask"]["trace"]
        assert trace["events"]
        assert "logprobs" not in trace["events"][0]


def test_a_block_causal_model_tells_all(tmp_path: Path) -> None:
    # Pages that an earlier request computed may differ from own ones in the last bits.
    body = {**DRAWN, "prompt": list(range(10, 20)), "seed": 5}
    with serving(sdar(tmp_path / "model"), model_names=["sdar"], sampling={}) as running:
        told = running.client.post(URL, json={**body, "return_trace": True, "return_step_maps": True, "logprobs": 2})
        choice = told.json()["choices"][0]
        assert [step + 1 for step in choice["logprobs"]["steps"]] == choice["remask"]["step_maps"]
