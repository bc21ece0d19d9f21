"""Bodies: what is refused, by which field's name, and what a client may leave out."""

import json
import re
from typing import Any

import pytest

from remask.errors import LAST_TAG, REPLACEMENTS
from tests.server.described import events
from tests.server.serving import CHATS, URL, Running, cached_tokens
from tests.waiting import Clock

USER = {"role": "user", "content": "from abbey go 1 , where am i ?"}
CALL = {"id": "c", "type": "function", "function": {"name": "stops", "arguments": '{"line": 4}'}}

BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "messages must be a list of length at least 1, got []"),
    ({"messages": "hello"}, "messages", "messages must be a list, got 'hello'"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'assistant' or 'tool', got 'robot'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "content is missing"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages", "tool_calls is of the role 'assistant'"),
    ({"messages": [{**USER, "tool_call_id": "1"}]}, "messages", "tool_call_id is of the role 'tool'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "must be a text or a list"),
    (
        {"messages": [{**USER, "audio": {"id": "a"}}]},
        "messages",
        "audio is not supported, as the models read and write",
    ),
    ({"messages": [{**USER, "function_call": CALL["function"]}]}, "messages", "`tool_calls` is its newer name"),
    (
        {"messages": [{**USER, "cache_control": {"type": "ephemeral", "ttl": "2h"}}]},
        "messages.0.cache_control",
        "5m",
    ),
    ({"mesages": [USER]}, "mesages", "Unknown field 'mesages'"),
    ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents", "Did you mean 'content'"),
    ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages cannot be set"),
    ({"messages": [USER], "chat_template_kwargs": 3}, "chat_template_kwargs", "an object of at most 64 variables"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "'text'"),
    ({"max_tokns": 4}, "max_tokns", "Did you mean 'max_tokens', 'min_tokens' or 'max_completion_tokens'?"),
    ({"tools": [{"type": "function"}]}, "tools", "tools.0.function is missing"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools",
        "tools.0.function.name must be a text of",
    ),
    ({"tool_choice": "any"}, "tool_choice", "must be 'none', 'auto' or 'required' or an object, got 'any'"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content", "content.0 must be an object, got 'x'"),
    ({"n": 10**30}, "n", f"n must be at most {2**63 - 1}, got 1"),
    ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
    ({"prompt": "x"}, "prompt", "of other endpoints, and this one takes messages; send that"),
    ({"prediction": {}, "best_of": 2}, "best_of", "Leave it out, or send null or 1; got 2"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "send both or neither"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"functions": [{"name": "f"}]}, "functions", "`tools` and `tool_choice` are their newer names"),
    ({"store": True, "logit_bias": True}, "logit_bias", "must be an object of at most 1024 token ids"),
    ({"response_format": {"type": "json_object"}}, "response_format", "tokenizer whose tokens have texts of their own"),
    ({"response_format": {"type": "grammar"}}, "response_format", "'json_object' or 'json_schema'"),
    ({"cfg_scale": 1e39}, "cfg_scale", "from 0 to 1000"),
    ({"top_k": -2}, "top_k", "whole number from 1"),
    ({"temperature": "hot"}, "temperature", "a number from 0 to 1000, got 'hot'"),
    ({"seed": 1 << 70}, "seed", "whole number from -(2**63 - 1) to 2**63 - 1, got"),
    ({"n": 0}, "n", "from 1 to 128, got 0 x 1"),
    ({"n": 1000}, "n", "from 1 to 128, got 1000 x 1"),
    ({"max_tokens": 10_000}, "max_tokens", "max_model_len is 1024"),
    ({"max_tokens": 15, "block_length": 4}, "max_tokens", "use max_tokens=16"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "send one of them"),
    ({"stop": ["x"] * 17}, "stop", "a list of at most 16 such texts"),
    ({"stop": "x" * 257}, "stop", "of at most 256 characters"),
    ({"steps": 5000}, "steps", "steps=5000 is more than the 4096 steps that a request may take; lower it"),
    ({"steps_per_block": 4096, "max_tokens": 4, "block_length": 2}, "steps_per_block", "make 8192 steps, more than"),
    ({"stop": 5}, "stop", "or a list of at most 16 such texts, got 5"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    ({"replay": {}}, "replay", f"left after {LAST_TAG}: {REPLACEMENTS['replay']}"),
    ({"segments": []}, "segments", f"left after {LAST_TAG}: {REPLACEMENTS['segments']}"),
    ({"speculate": 2}, "speculate", f"left after {LAST_TAG}: {REPLACEMENTS['speculate']}"),
    ({"remasking": "best"}, "remasking", "Available"),
    ({"threshold": 0.5, "remasking": {"factor": 1.0}}, "threshold", "set one of them"),
    (
        {"confidence_threshold": 0.9},
        "confidence_threshold",
        "did you mean 'threshold'? The field 'confidence_threshold' ",
    ),
    ({"eps": 0.5}, "eps", "eps belongs in remasking: remasking={'eps': ...}"),
    ({"sampling": {"early_stop": True}}, "early_stop", "early_stop belongs in blocks: blocks={'early_stop': ...}"),
    ({"remasking": 3}, "remasking", ", or an object of remasking fields, got 3"),
    (
        {"uniform": {"presett": "s32/b32"}},
        "uniform.presett",
        "Unknown uniform field 'uniform.presett'. Did you mean 'preset'",
    ),
    (
        {"sampling": {"blocks": {"xyz": 1}}},
        "blocks.xyz",
        "Unknown blocks field 'blocks.xyz'. Available: early_stop",
    ),
    ({"cache": "bicache", "cache_config": {"depth": 70}}, None, "10 layers"),
    ({"cache_config": {"depht": 1}}, None, "Did you mean 'depth'"),
    ({"prefix_length": -1}, "prefix_length", "whole number from 0"),
    ({"prefix_length": 5000}, "prefix_length", "from 0 to the prompt's"),
    (
        {"remasking": {"rule": "order", "order": [[1, 2], [3, -1]]}},
        "remasking.order",
        "order[1][1] must be a whole number from 0",
    ),
    (
        {"remasking": {"rule": "random", "config": {"window": 1}}},
        "remasking.config",
        "some of its own, and 'random' has none",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be a whole number from 1"),
    ({"cache_salt": 5}, "cache_salt", "a text of valid Unicode, of at most 1024 characters, got 5"),
    ({"cache_config": 3}, "cache_config", "an object of at most 64 settings"),
    ({"stream_options": {"include_usag": True}}, "stream_options", "'include_usag'. Did you mean 'include_usage'?"),
    ({"stream_options": {"include_usage": True, "extra": 1}}, "stream_options", "not permitted. Unknown field 'extra'"),
    ({"response_format": {"type": "text", "shema": {}}}, "response_format", "'shema'. Did you mean 'json_schema'?"),
    ({"tools": [{"type": "function", "function": {"name": "f", "args": 1}}]}, "tools", "Unknown field 'args'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "with stream=true"),
    ({"stream_drafts": True}, "stream_drafts", "with stream=true"),
    ({"messages": [{**USER, "cache_control": {"type": "ephemeral"}}], "prefix_length": 1}, "prefix_length", "one of"),
    ({"sampling": {"max_tokens": 3}, "max_tokens": 4}, "max_tokens", "is both in the request and in its 'sampling'"),
    ({"sampling": {"cache_salt": "a"}}, "cache_salt", "it belongs in the request, beside 'sampling'"),
    ({"sampling": {"n": 2}}, "n", "n is not a sampling parameter: it belongs in the request, beside 'sampling'"),
    ({"sampling": {"best_of": 2}}, "best_of", "best_of is not a sampling parameter: it belongs in the request"),
    ({"sampling": {"temprature": 1}}, None, "Unknown sampling parameter 'temprature'. Did you mean 'temperature'"),
    ({"sampling": [1]}, None, "sampling must be an object of sampling parameters, got [1]"),
    ({"refresh_interval": 3}, None, "refresh_interval is a setting of the cache policy 'bicache': it belongs into"),
    ({"cache": "bicache", "cache_config": {"steps": 3}}, "steps", "steps is no setting of cache policy 'bicache'"),
]


@pytest.mark.parametrize(("fields", "param", "text"), BAD, ids=[json.dumps(fields)[:50] for fields, _, _ in BAD])
def test_a_bad_body_is_a_400_that_names_the_field(
    server: Running, fields: dict[str, Any], param: str | None, text: str
) -> None:
    response = server.chat({"messages": [USER], **fields})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [[1], ["a"]]}, "prompt.1.0 must be a whole number, got 'a'"),
        ({"prompt": ["x", [1]]}, "prompt.1 must be a text, got [1]"),
        ({"prompt": [1, 10**12]}, "prompt holds 1000000000000; token ids are whole numbers"),
        ({"prompt": "x", "echo": True}, "echo is not supported: an answer repeats no prompt"),
        ({"prompt": "x", "suffix": 5}, "suffix must be a text"),
        ({"prompt": "x", "suffix": "y", "canvas": [{"mask": 1}]}, "canvas and suffix both say"),
        ({"prompt": "x", "canvas": []}, "canvas has no hole"),
        ({"prompt": "x", "canvas": [{"text": "y"}]}, "canvas has no hole"),
        ({"prompt": "x", "canvas": "y"}, "canvas must be a list of at most 4096 parts"),
        ({"prompt": "x", "canvas": [{"mask": {"min": None}}]}, "canvas.mask needs max"),
        ({"prompt": "x", "canvas": [{"mask": 0}]}, "canvas.mask must be a whole number from 1"),
        ({"prompt": "x", "canvas": [{"mask": {"min": 3, "max": 2}}]}, "canvas.mask: min=3 is more than max=2"),
        ({"prompt": "x", "canvas": [{"mask": {"min": 3}}]}, "canvas.mask needs max"),
        ({"prompt": "x", "canvas": [{"mask": 1, "text": "y"}]}, "exactly one of text, token_ids and mask"),
        ({"prompt": "x", "canvas": [{"hole": 1}]}, "Unknown part field 'canvas[0].hole'"),
        ({"prompt": "x", "canvas": [{"mask": 1}, {"token_ids": [10**6]}]}, "canvas holds the token id 1000000"),
        ({"prompt": "x", "canvas": [{"mask": 4}], "max_tokens": 4}, "max_tokens: the parts of a canvas say"),
        ({"prompt": "x", "best_of": 3}, "best_of is not supported"),
        ({"prompt": "x", "logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"prompt": "x", "logprobs": True}, "logprobs must be a whole number from 0 to 20"),
        ({"prompt": "x", "logprobs": 2, "top_logprobs": 3}, "two names of one thing"),
        ({"prompt": "\ud800"}, "not valid Unicode"),
        ({"prompt": "x", "messages": [USER]}, "messages is a field of other endpoints, and this one takes prompt"),
    ],
)
def test_bad_text_completions(server: Running, fields: dict[str, Any], text: str) -> None:
    response = server.client.post(
        "/v1/completions", content=json.dumps(fields), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert text in error["message"]
    assert error["param"] is not None


@pytest.mark.few(3)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 15, 16, 33, 128])
def test_a_client_that_sends_only_a_length_is_answered(server: Running, length: int) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        told = server.answer(URL, {"messages": CHATS[0], "ignore_eos": True, name: length})
        assert told["usage"]["completion_tokens"] == length


def test_errors_name_the_length_as_its_api_does(server: Running) -> None:
    turns = [{"role": "user", "content": "abbey"}]
    for url, body, name in (
        (URL, {"messages": turns}, "max_tokens"),
        (URL, {"messages": turns}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "abbey"}, "max_tokens"),
        ("/v1/responses", {"input": turns}, "max_output_tokens"),
        ("/v1/messages", {"messages": turns}, "max_tokens"),
    ):
        for wrong, said in (
            ({name: 5000}, f"tokens and {name}=5000 make a canvas of"),
            ({name: 6, "block_length": 4}, f"{name}=6 is not a multiple of block_length=4; use {name}=8"),
            ({name: 4, "min_tokens": 9}, f"is more than {name}=4, the places of the response; raise {name},"),
        ):
            error = server.client.post(url, json={**body, **wrong}).json()["error"]
            assert said in error["message"]
            assert url == "/v1/messages" or error["param"] == ("min_tokens" if "min_tokens" in wrong else name)
    long = server.client.post("/v1/responses", json={"input": "abbey " * 1100}).json()["error"]
    assert (long["param"], "max_output_tokens=" in long["message"]) == ("input", True)


def test_errors_repeat_little_of_a_long_name(server: Running) -> None:
    name, turns = "n" * 100_000, [{"role": "user", "content": "abbey"}]
    function = {"type": "function", name: 1}
    for more in (
        {name: 1},
        {"sampling": {name: 1}},
        {"uniform": {name: 1}},
        {"canvas": [{name: 1}]},
        {"tools": [function]},
    ):
        answer = server.client.post(URL, json={"messages": turns, **more})
        assert answer.status_code == 400
        assert len(answer.content) < 10_000


def test_errors_name_the_form_as_its_api_does(tariff: Running) -> None:
    turns = [{"role": "user", "content": "abbey"}]
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 9}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    chat = {"type": "json_schema", "json_schema": {"schema": schema}}
    for url, body, name in (
        (URL, {"messages": turns, "max_tokens": 1, "response_format": chat}, "response_format"),
        (URL, {"messages": turns, "max_tokens": 1, "structured_outputs": {"json": schema}}, "structured_outputs"),
        ("/v1/messages", {"messages": turns, "max_tokens": 1, "output_config": form}, "output_config"),
        ("/v1/responses", {"input": turns, "max_output_tokens": 1, "text": form}, "text"),
    ):
        assert re.match(rf"{name}: max_\w*tokens=1 does not suit it: no answer", tariff.refusal(url, body)["message"])
    said = {"role": "assistant", "content": "abbey"}
    ending = {"continue_final_message": True, "add_generation_prompt": False}
    for end in ("", "/render"):
        body = {"messages": [*turns, said], **ending, "response_format": chat}
        assert tariff.refusal(URL + end, body)["param"] == "response_format"


def test_a_client_that_sends_no_length_gets_what_fits(server: Running) -> None:
    tokens = server.client.post("/tokenize", json={"prompt": "abbey"}).json()["tokens"]
    full = server.answer("/v1/completions", {"prompt": tokens * 1019, "ignore_eos": True})
    assert full["usage"]["completion_tokens"] == 4, "whole blocks of the five positions that are left"


def test_steps_that_a_client_sends_replace_the_servers(server: Running) -> None:
    for fields, steps in (({"steps": 16}, 16), ({"steps_per_block": 2}, 16), ({"block_length": 4}, 8), ({}, 8)):
        told = server.answer(URL, {"messages": CHATS[0], "ignore_eos": True, **fields})
        assert told["remask"]["steps"] == steps


def test_a_stream_ends_with_the_work_of_the_whole_answer(server: Running) -> None:
    """Under each API that streams."""
    system, user = CHATS[0]
    fields = {"max_tokens": 8, "ignore_eos": True, "block_length": 8, "steps": 8, "cache": "none"}
    counted = {"stream_options": {"include_usage": True}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": CHATS[0]},
        "/v1/completions": {"prompt": user["content"]},
        "/v1/responses": {"instructions": system["content"], "input": user["content"]},
        "/v1/messages": {"system": system["content"], "messages": [user]},
    }
    for path, body in bodies.items():
        whole = server.client.post(path, json={**body, **fields}).json()
        asked = {**body, **fields, **(counted if "completions" in path else {}), "stream": True}
        streamed = server.client.post(path, json=asked)
        told = [event.get("response", event) for event in events(streamed.text)]
        server.document.check(streamed)
        (work,) = [event["remask"] for event in told if "remask" in event]
        assert work["steps"] == work["forwards"] == 8
        assert work == whole["remask"]


def test_content_parts_are_text(server: Running) -> None:
    system, user = CHATS[0]
    parts = [{"type": "text", "text": user["content"][:10]}, {"type": "text", "text": user["content"][10:]}]
    told = server.chat({"messages": [system, {"role": "user", "content": parts}]}).json()
    assert told["choices"] == server.ask().json()["choices"]


def cached(server: Running, body: dict[str, Any]) -> int:
    """Cached tokens of the second of two equal requests, with an empty store before."""
    server.client.delete("/v1/cache")
    server.chat(body)
    return cached_tokens(server.chat(body).json())


@pytest.mark.thorough
def test_where_the_shared_prefix_ends(server: Running) -> None:
    system, user = CHATS[0]
    example = [{"role": "user", "content": "from abbey go 1"}, {"role": "assistant", "content": "abbey"}]
    marker = {"cache_control": {"type": "ephemeral"}}
    before_last = cached(server, {"messages": [system, *example, user]})
    marked = cached(server, {"messages": [{**system, **marker}, *example, user]})
    everything = cached(server, {"messages": [{**system, **marker}, *example, {**user, **marker}]})
    assert 0 < marked < before_last < everything
    assert marked == cached(server, {"messages": [system, user]})
    assert cached(server, {"messages": [system, user], "prefix_length": 250}) == 250
    assert cached(server, {"messages": [system, user], "prefix_length": 0}) == 0
    assert cached(server, {"messages": [system, user], "cache": "none"}) == 0


def test_salts_keep_tenants_apart(server: Running) -> None:
    server.client.delete("/v1/cache")
    counts = [cached_tokens(server.ask(cache_salt=salt).json()) for salt in ("one", "two", "one")]
    assert counts[0] == counts[1] == 0 < counts[2]


def test_tokenize_and_back(server: Running) -> None:
    text = "from abbey go 1"
    told = server.client.post("/tokenize", json={"prompt": text}).json()
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 1024)
    assert server.client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": text}
    chat = server.client.post("/tokenize", json={"messages": CHATS[0]}).json()
    assert chat["count"] == server.ask().json()["usage"]["prompt_tokens"]
    server.refusal("/tokenize", {"prompt": "x", "messages": CHATS[0]})
    for own in ({"continue_final_message": True}, {"chat_template_kwargs": {"a": 1}}):
        assert "is of messages" in server.refusal("/tokenize", {"prompt": "x", **own})["message"]
    server.refusal("/detokenize", {"tokens": [1 << 40]})


def test_a_deadline_that_passes_is_a_504(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the request begins, of a stream too, and while it runs."""
    response = server.ask(deadline_s=1e-9, stream=True)
    assert (response.status_code, response.headers["content-type"]) == (504, "application/json")
    assert response.json()["error"]["code"] == "deadline_exceeded"
    monkeypatch.setattr(server.service.llm.engine, "clock", Clock(tick=1.0))
    steps = server.service.llm.engine.stats.steps
    late = {"deadline_s": 40, "max_tokens": 128, "block_length": 1, "steps": 128, "ignore_eos": True}
    assert server.refusal(URL, {"messages": CHATS[0], **late}, 504)["code"] == "deadline_exceeded"
    assert server.service.llm.engine.stats.steps > steps, "it had begun"
