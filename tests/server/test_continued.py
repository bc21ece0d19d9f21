"""Continuing an answer: the last message is its beginning, in chats, messages and Python, on every kind of model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from remask.errors import ConfigError
from remask.llm import LLM
from remask.tasks.cards import card
from tests.answers.test_structured import ROBOT, matches
from tests.server.serving import URL, Running, joined, serving, under_template
from tests.server.test_kinds_served import sdar
from tests.server.test_tools import BUY, NAMED, forms, saying

OPEN: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}


def asked(name: str) -> tuple[list[dict[str, Any]], str]:
    """A conversation that a bundled model answers, and its answer."""
    known = card(name)
    assert known is not None
    question = known.questions[0]
    return list(known.messages(question)), str(question.answer)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def prompt_of(running: Running, messages: list[dict[str, Any]], **fields: Any) -> str:
    tokens = running.client.post("/tokenize", json={"messages": messages, **fields}).json()["tokens"]
    text: str = running.service.intake.tokenizer.decode(tokens, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("text", ["", " ", "1 Bob", "1 Bob 6 Lu", "  two\n\n", "<|eot_id|>", "\U0010fffd é\U00100000"])
def test_the_last_turn_stays_open_and_is_as_it_was_given(tariff: Running, text: str) -> None:
    """Though the template trims texts. Names of special tokens in it are text, as ever."""
    messages, _ = asked("bundled-tariff")
    begun = prompt_of(tariff, messages)
    assert prompt_of(tariff, [*messages, said(text)], **OPEN) == begun + text
    chat = tariff.chat({"messages": [*messages, said(text)], **OPEN, "return_token_ids": True}).json()
    body: dict[str, Any] = {"messages": [*messages, said(text)], **OPEN}
    assert chat["prompt_token_ids"] == tariff.client.post("/tokenize", json=body).json()["tokens"]
    special = tariff.service.intake.tokenizer.special_ids
    trusted = tariff.client.post("/tokenize", json={**body, "control_tokens": True}).json()["tokens"]
    named = [sum(token in special for token in each) for each in (chat["prompt_token_ids"], trusted)]
    assert named[1] - named[0] == ("<|eot_id|>" in text)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bundled-transit", "bundled", "bundled-uniform"])
def test_an_answer_goes_on(name: str) -> None:
    """Masked and uniform models finish what they would have said, spaces included."""
    messages, answer = asked(name)
    words = re.findall(r" ?\S+", answer)
    with serving(LLM(name, cache="auto", dtype="float32", device="cpu"), model_names=[name], sampling={}) as running:
        for count in (0, 1, 2):
            given = "".join(words[:count])
            body = {"messages": [*messages, said(given)], **OPEN, "seed": 3}
            whole = running.chat(body).json()
            text = whole["choices"][0]["message"]["content"]
            assert (given + text).startswith(answer[: len(given) + 8]), (given, text)
            assert joined(running.stream(body)) == text
            echoed = {**body, "echo": True}
            assert running.chat(echoed).json()["choices"][0]["message"]["content"] == given + text
            assert joined(running.stream(echoed)) == given + text
            (output,) = running.llm.chat(body["messages"], {"seed": 3}, **OPEN)
            assert output.text == text


def test_messages_api_goes_on_from_an_assistants_turn(tariff: Running) -> None:
    """Whose text is no part of the answer, whole and streamed."""
    messages, _ = asked("bundled-tariff")
    (system, user), begun = messages, [{"type": "text", "text": "1 B"}, {"type": "text", "text": "ob "}]
    body: Any = {
        "model": "bundled-tariff",
        "system": system["content"],
        "messages": [user, {"role": "assistant", "content": begun}],
    }
    chat = tariff.chat({"messages": [*messages, said("1 Bob ")], **OPEN, "max_tokens": 8}).json()
    with tariff.anthropic() as client:
        answer = client.messages.create(**body, max_tokens=8)
        with client.messages.stream(**body, max_tokens=8) as stream:
            streamed = "".join(stream.text_stream)
        counted = client.messages.count_tokens(**body).input_tokens
    assert answer.content[0].text == streamed == chat["choices"][0]["message"]["content"]
    assert counted == chat["usage"]["prompt_tokens"]


def test_the_official_client_goes_on(tariff: Running) -> None:
    """With log-probabilities of what is new, and several choices."""
    messages, _ = asked("bundled-tariff")
    with tariff.openai() as client:
        told = client.chat.completions.create(
            model="bundled-tariff", messages=[*messages, said("1 Bob")], n=3, max_tokens=8, seed=3,  # type: ignore[list-item]
            temperature=50.0, logprobs=True, top_logprobs=2, extra_body={**OPEN, "return_token_ids": True})  # fmt: skip
    assert len({choice.message.content for choice in told.choices}) > 1
    for choice in told.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == 8, "of what is new alone"


def test_the_shared_prefix_is_found(tariff: Running) -> None:
    """What stands before the question is stored once for an answer and all that continue it."""
    messages, _ = asked("bundled-tariff")
    for body in ({"messages": messages}, {"messages": [*messages, said("1 Bob")], **OPEN}):
        told = [tariff.chat({**body, "cache_config": {"depth": 2}, "cache": "bicache"}).json() for _ in range(2)]
        lengths = [each["remask"]["prefix_tokens"] for each in told]
        assert lengths[0] == lengths[1] > 0
        assert told[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == lengths[1]
    assert told[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == lengths[0], "the first had stored it"
    marked = {**said("1 Bob 6 Luis"), "cache_control": {"type": "ephemeral"}}
    more = tariff.chat({"messages": [*messages, marked], **OPEN, "cache": "bicache", "cache_config": {"depth": 2}})
    assert more.json()["remask"]["prefix_tokens"] == more.json()["usage"]["prompt_tokens"]


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"json": ROBOT}, '{"name": "R2'),
    ({"json": ROBOT}, '{"name":"é"'),
    ({"json": ROBOT}, '{"name": "", "on": true, "legs": -1'),
    ({"regex": "[a-c]{3}( or [0-9]{2,4})?"}, "abc or 1"),
    ({"choice": ["yes, please", "yes, é", "no"]}, "yes, "),
    ({"choice": ["yes"]}, "yes"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("form", "given"), FORMS)
def test_the_given_part_is_the_beginning_of_a_form(tariff: Running, form: dict[str, Any], given: str) -> None:
    forms()
    messages, _ = asked("bundled-tariff")
    body: dict[str, Any] = {"messages": [*messages, said(given)], **OPEN, "structured_outputs": form, "max_tokens": 40}
    for more in ({"n": 2, "temperature": 2.0, "seed": 5}, {"block_length": 5}, {"suffix": " and so on"}):
        told = tariff.chat({**body, **more}).json()
        assert "choices" in told, told
        for choice in told["choices"]:
            matches(form, given + choice["message"]["content"])
    (output,) = tariff.llm.chat(body["messages"], {"max_tokens": 40}, structured_outputs=form, **OPEN)
    matches(form, given + str(output.text))


@pytest.mark.parametrize(
    ("form", "given", "place", "wrong"),
    [
        ({"json": ROBOT}, '{"name": 3', 10, "3"),
        ({"json": ROBOT}, "Sure: {", 1, "S"),
        ({"regex": "[a-c]{3}é"}, "abcê", 4, "ê"),
        ({"choice": ["yes", "no"]}, "yes!", 4, "!"),
    ],
)
def test_where_a_form_cannot_be_continued(
    tariff: Running, form: dict[str, Any], given: str, place: int, wrong: str
) -> None:
    forms()
    told = tariff.refusal(URL, {"messages": [said(given)], **OPEN, "structured_outputs": form})
    assert f"leaves the form at character {place}: no answer has {wrong!r} behind" in told["message"]


def test_infilling_goes_on(tariff: Running) -> None:
    """A suffix and a canvas stand behind the given part; the form of a canvas is that of its hole."""
    messages, _ = asked("bundled-tariff")
    body: dict[str, Any] = {"messages": [*messages, said("1 Bob")], **OPEN}
    canvas: list[dict[str, Any]] = [{"text": " 6"}, {"mask": {"max": 4}}, {"text": " 2 Robin"}]
    told = tariff.chat({**body, "canvas": canvas}).json()["choices"][0]
    assert told["message"]["content"] == f" 6{told['holes'][0]} 2 Robin"
    told = tariff.chat({**body, "canvas": canvas, "structured_outputs": {"choice": [" Luis", " Nina"]}}).json()
    assert told["choices"][0]["holes"][0] in (" Luis", " Nina")
    told = tariff.chat({**body, "suffix": " 9", "max_tokens": 8, "return_token_ids": True}).json()
    fixed = told["usage"]["prompt_tokens"] - len(told["prompt_token_ids"])
    assert (fixed, len(told["choices"][0]["token_ids"])) == (2, 8), "the answer is the fill alone"


def test_tools_stand_in_the_history_and_behind_the_given_part(taught: Running) -> None:
    forms()
    call = {"id": "c", "type": "function", "function": {"name": "buy", "arguments": '{"who": "Nina", "price": 5}'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Buy it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sold"},
    ]
    given = said("It is ")
    assert prompt_of(taught, [*history, given], **OPEN).endswith("tool: soldassistant: It is ")
    asking = {"messages": [*history, given], **OPEN, "tools": [BUY], "max_tokens": 48, "return_token_ids": True}
    told = taught.chat({**asking, "tool_choice": NAMED, "block_length": 64, "steps": 8}).json()
    (made,) = told["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"])["who"] in ("Nina", "Ruth")
    free = '<tool_call>\n{"name": "buy", "arguments": {"who": "Nina", "price": 5}}\n</tool_call>'
    with saying(taught, free):
        choice = taught.chat(asking).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls", choice
    refused = taught.chat({"messages": history[:2], **OPEN})
    assert "calls tools, so their results follow it" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"continue_final_message": True}, "needs add_generation_prompt=false"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "needs add_generation_prompt=false"),
        ({**OPEN, "messages": [{"role": "user", "content": "x"}]}, "the last one is of the role 'user'"),
        ({"echo": True}, "only the message that it continues"),
        ({**OPEN, "continue_final_message": 1}, "continue_final_message"),
    ],
)
def test_what_cannot_be_continued_says_why(tariff: Running, fields: dict[str, Any], told: str) -> None:
    assert told in tariff.refusal(URL, {"messages": [said("x")], **fields})["message"]


def test_what_asks_for_nothing_changes_nothing(tariff: Running) -> None:
    messages, _ = asked("bundled-tariff")
    plain = tariff.chat({"messages": messages}).json()["choices"]
    for value in (False, None):
        told = tariff.chat({"messages": messages, "continue_final_message": value, "echo": value}).json()
        assert told["choices"] == plain
    refused = tariff.client.post("/v1/completions", json={"prompt": "x", "echo": True})
    assert "an answer repeats no prompt" in refused.json()["error"]["message"]


def test_a_template_without_the_assistants_text_is_named(tariff: Running) -> None:
    tokenizer = tariff.service.intake.tokenizer
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with (
        under_template(tokenizer, template),
        pytest.raises(ConfigError, match="does not write the text of the assistant's last turn"),
    ):
        tokenizer.render_chat(
            [{"role": "user", "content": "x"}, said("y")], add_generation_prompt=False, continue_final_message=True
        )


def test_a_block_causal_model_fills_the_block_of_the_given_parts_end(tmp_path: Path) -> None:
    """And reads the exact pages of what stands before it."""
    llm = sdar(tmp_path / "model")
    assert llm.tokenizer is not None
    words = "abbey acorn alder arch ash abbey acorn alder arch ash"
    messages = [{"role": "user", "content": f"{words} {words}"}]
    with serving(llm, model_names=["sdar"], sampling={}) as running:
        for count in range(1, 6):
            given = " ".join(words.split()[:count])
            body = {"messages": [*messages, said(given)], **OPEN, "max_tokens": 6, "ignore_eos": True}
            told = running.chat({**body, "return_token_ids": True, "return_trace": True}).json()
            prompt, choice = told["prompt_token_ids"], told["choices"][0]
            assert llm.tokenizer.decode(prompt).endswith(given)
            first = choice["remask"]["trace"]["events"][0]["positions"]  # counted from the end of the prompt
            assert all(at < 4 - len(prompt) % 4 for at in first), (len(prompt), first)
            assert choice["message"]["content"].startswith(" ")
        again = running.chat(body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) // 8 * 8 - 8 > 0
