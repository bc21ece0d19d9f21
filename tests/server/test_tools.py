"""Tools: forced calls always parse, free ones are read from answers, and OpenAI's client sees what it expects."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.answers.answer import SettledToken
from remask.checkpoint.tokenizer import byte_tokenizer
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.readers.forced import ForcedTokens
from remask.request.result import Transfer
from remask.request.trace import TokenLogprob
from remask.server.config import ServerConfig
from remask.server.intake import Intake
from remask.server.protocol.generation import ChatBody
from remask.server.tools import HERMES, LLAMA, CallReader, TextPiece, Tool, ToolCalls, detect_call_format, join_pieces
from tests.server.serving import TEMPLATE, URL, Running, serving

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {"who": {"enum": ["Nina", "Ruth"]}, "price": {"type": "integer"}, "gift": {"type": "boolean"}},
    "required": ["who", "price"],
    "additionalProperties": False,
}
BUY = {"type": "function", "function": {"name": "buy", "description": "Buys.", "parameters": ORDER, "strict": True}}
STOP = {"type": "function", "function": {"name": "stop"}}
NAMED = {"type": "function", "function": {"name": "buy"}}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Buy it"}],
    "max_tokens": 48,
    "block_length": 64,
    "steps": 8,
}


@pytest.fixture
def client(taught: Running) -> Iterator[openai.OpenAI]:
    with taught.openai() as made:
        yield made


def forms() -> None:
    pytest.importorskip("outlines_core", reason="needs outlines-core: pip install outlines-core")


def say(client: openai.OpenAI, **fields: Any) -> Any:
    own = {name: fields.pop(name) for name in ("cache",) if name in fields}
    body = {**ASK, **fields}
    body["extra_body"] = {"block_length": body.pop("block_length"), "steps": body.pop("steps"), **own}
    return client.chat.completions.create(model="bundled-tariff", **body)


def valid(arguments: str) -> bool:
    read = json.loads(arguments)
    kinds = {"who": str, "price": int, "gift": bool}
    kept = all(type(value) is kinds[name] for name, value in read.items())
    return kept and {"who", "price"} <= read.keys() <= kinds.keys() and read["who"] in ("Nina", "Ruth")


@pytest.mark.parametrize("cache", ["none", "block-dual", "dkv-decode"])
def test_a_named_call_always_has_arguments_of_its_schema(client: openai.OpenAI, cache: str) -> None:
    forms()
    for seed in range(2):
        fields = {"tools": [BUY, STOP], "tool_choice": NAMED, "temperature": 1.2, "seed": seed, "cache": cache}
        (choice,) = say(client, **fields).choices
        assert choice.finish_reason == "stop", "as OpenAI says of a named call"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "buy")
        assert call.id.startswith("call_")
        assert valid(call.function.arguments)


def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI) -> None:
    forms()
    answer = say(client, tools=[BUY, STOP], tool_choice="required", temperature=1.0, seed=3, n=3, max_tokens=64)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert valid(call.function.arguments) if call.function.name == "buy" else call.function.arguments == "{}"
    (choice,) = say(client, tools=[STOP], tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_stream_carries_the_same_call(client: openai.OpenAI, choice: Any) -> None:
    forms()
    fields: dict[str, Any] = {
        "tools": [BUY, STOP],
        "tool_choice": choice,
        "seed": 5,
        "temperature": 1.0,
        "max_tokens": 64,
    }
    (whole,) = say(client, **fields).choices
    pieces: list[Any] = []
    together: list[list[Any]] = []
    finish, text = None, ""
    for chunk in say(client, **fields, stream=True):
        for part in chunk.choices:
            pieces += part.delta.tool_calls or []
            together.append(part.delta.tool_calls or [])
            text += part.delta.content or ""
            finish = part.finish_reason or finish
    assert (text, finish) == ("", whole.finish_reason)
    assert [piece.index for piece in pieces] == [0] * len(pieces)
    (expected,) = whole.message.tool_calls
    assert pieces[0].id is not None
    assert pieces[0].function.name == expected.function.name
    assert all(len(each) == len({piece.index for piece in each}) for each in together), "one entry of each index"
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == expected.function.arguments
    assert len(pieces) > 1 or choice == "required", "the arguments of a named call come as they settle"


@contextmanager
def saying(running: Running, text: str) -> Iterator[None]:
    """While this is open the server's model says `text`, for which it was not trained."""
    tokens = running.service.intake.tokenizer.encode(text, add_special_tokens=False)
    length = len(tokens)
    made = Intake._requests

    def forced(asked: Request) -> Request:
        params = replace(asked.params, max_tokens=length, block_length=length, steps=1, ignore_eos=True)
        start = len(asked.prompt_token_ids)
        said = Transfer(0, tuple(range(start, start + length)), tuple(tokens))
        return replace(asked, params=params).with_readers(*asked.readers, ForcedTokens([said]))

    def requests(*given: Any, **more: Any) -> list[Request]:
        return [forced(asked) for asked in made(*given, **more)]

    with patch.object(Intake, "_requests", requests):
        yield


def test_calls_that_the_model_makes_are_read(client: openai.OpenAI, taught: Running) -> None:
    """The model is made to say so: it was not trained for it."""
    call = '<tool_call>\n{"name": "buy", "arguments": {"who": "Nina", "price": 5}}\n</tool_call>'
    fields: dict[str, Any] = {"tools": [BUY, STOP]}
    body = {"messages": ASK["messages"], **fields}
    with saying(taught, f"Sure. {call}\n{call}"):
        (choice,) = taught.chat(body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Sure. "
        first, second = choice["message"]["tool_calls"]
        assert first["function"] == second["function"] == {"name": "buy", "arguments": '{"who": "Nina", "price": 5}'}
        assert first["id"] != second["id"]
        single = taught.chat({**body, "parallel_tool_calls": False}).json()["choices"][0]
        assert len(single["message"]["tool_calls"]) == 1
        chunks = taught.stream(body)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == "Sure. "
        streamed = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
        assert [piece["index"] for piece in streamed] == [0, 1]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    plain = taught.chat({**body, "tool_choice": "none", "max_tokens": 8}).json()["choices"][0]
    assert plain["finish_reason"] in ("stop", "length")
    assert "tool_calls" not in plain["message"]


CALL = '<tool_call>\n{"name": "buy", "arguments": {"who": "Nina", "price": 5}}\n</tool_call>'


@pytest.mark.parametrize(("said", "texts"), [(f"Sure. {CALL}\n{CALL} Bye.", ["Sure. ", " Bye."]), (CALL, [])])
def test_log_probabilities_are_of_the_text_alone(taught: Running, said: str, texts: list[str]) -> None:
    """Of chats and of responses, whole and streamed; OpenAI's are of the tokens of a message's content."""

    def joined(content: list[dict[str, Any]]) -> str:
        return b"".join(bytes(each["bytes"]) for each in content).decode()

    chat = {"messages": ASK["messages"], "tools": [BUY, STOP], "logprobs": True, "top_logprobs": 1}
    flat = {"type": "function", "name": "buy", "parameters": ORDER}
    responses = {"input": "Buy it", "tools": [flat], "top_logprobs": 1}
    with saying(taught, said):
        (choice,) = taught.answer(URL, chat)["choices"]
        parts = [part for chunk in taught.stream(chat) for part in chunk["choices"]]
        output = taught.answer("/v1/responses", responses)["output"]
        with taught.openai() as client:
            events: list[Any] = list(client.responses.create(model="bundled-tariff", stream=True, extra_body=responses))
    if texts:
        assert joined(choice["logprobs"]["content"]) == choice["message"]["content"] == "".join(texts)
    else:
        assert (choice["logprobs"], choice["message"]["content"]) == (None, None)
    assert all(part["logprobs"] is None for part in parts if "tool_calls" in part["delta"])
    streamed = [each for part in parts for each in (part["logprobs"] or {}).get("content", [])]
    assert joined(streamed) == "".join(texts)
    found = [item["content"][0] for item in output if item["type"] == "message"]
    assert [text["text"] for text in found] == texts
    assert [joined(text["logprobs"]) for text in found] == texts
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(joined([each.model_dump() for each in event.logprobs]) for event in deltas) == "".join(texts)
    kinds = ["message", "function_call", "function_call", "message"] if texts else ["function_call"]
    assert [item["type"] for item in output] == kinds, "in the order in which the model wrote them"


def test_the_template_tells_of_tools_and_of_calls_made(taught: Running) -> None:
    turns = [
        {"role": "user", "content": "Buy it"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "buy", "arguments": '{"price": 5}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    body = {"messages": turns, "tools": [BUY], "max_tokens": 8, "return_token_ids": True}
    told = taught.chat(body).json()
    text = taught.service.intake.tokenizer.decode(told["prompt_token_ids"])
    assert '"description": "Buys."' in text
    assert '<tool_call>{"name": "buy", "arguments": {"price": 5}}</tool_call>' in text
    assert "tool: done" in text
    silent = taught.chat({**body, "tool_choice": "none"}).json()
    assert "Buys" not in taught.service.intake.tokenizer.decode(silent["prompt_token_ids"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": "required"}, "tool_choice asks for a call, and there are no tools"),
        ({"tools": [BUY], "tool_choice": {"type": "function", "function": {"name": "sell"}}}, "none of tools: buy"),
        ({"tools": [BUY, BUY]}, "two of them have one name"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [BUY], "chat_template_kwargs": {"tools": []}}, "both name tools"),
        ({"tools": [BUY], "tool_choice": NAMED, "canvas": [{"mask": 1}]}, "canvas and tool_choice both say"),
        (
            {"tools": [BUY], "tool_choice": NAMED, "response_format": {"type": "json_object"}},
            "response_format and tool_choice both say",
        ),
        (
            {"tools": [BUY], "tool_choice": "required", "structured_outputs": {"json_object": True}},
            "structured_outputs and tool_choice both say",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"if": 1}}}}}
                ],
                "tool_choice": "required",
            },
            "the parameters of 'f' cannot be guaranteed",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(taught: Running, fields: dict[str, Any], told: str) -> None:
    assert told in taught.refusal(URL, {**ASK, **fields})["message"]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_the_conflict_of_a_choice_by_form_is_with_the_tools(choice: dict[str, Any]) -> None:
    body = ChatBody.model_validate({**ASK, "tools": [BUY], "suffix": ".", **choice})
    with pytest.raises(ConfigError, match=r"^suffix and tools both say what the answer is"):
        body.calls(None, by_form=True)


def test_a_call_needs_room(taught: Running) -> None:
    forms()
    response = taught.chat({**ASK, "max_tokens": 4, "block_length": 4, "tools": [BUY], "tool_choice": NAMED})
    assert "tools: max_tokens=4 does not suit it" in response.json()["error"]["message"]


def test_a_template_without_tools_cannot_offer_them(server: Running) -> None:
    body = {**ASK, "tools": [BUY]}
    assert "does not tell it of tools" in server.chat(body).json()["error"]["message"]
    assert server.chat({**body, "tool_choice": "none", "max_tokens": 4, "block_length": 4}).status_code == 200
    completion = server.client.post("/v1/completions", json={"prompt": "x", "tools": [BUY]})
    assert "Unknown field 'tools'" in completion.json()["error"]["message"]
    made = {"type": "function_call", "call_id": "a", "name": "buy", "arguments": "{}"}
    given = {"type": "function_call_output", "call_id": "a", "output": "done"}
    error = server.client.post("/v1/responses", json={"input": [made, given]}).json()["error"]
    assert error["message"].startswith("input: calls of tools and their results")
    assert error["param"] == "input"


def test_a_uniform_model_cannot_be_held_to_a_schema() -> None:
    llm = LLM("bundled-uniform", dtype="float32", device="cpu")
    assert llm.tokenizer is not None
    llm.tokenizer.use_chat_template(TEMPLATE)
    intake = Intake(llm, ServerConfig(model_names=["uniform"]))
    free = {"messages": ASK["messages"], "tools": [STOP]}
    assert len(intake.chat(ChatBody.model_validate(free), "r")) == 1
    with pytest.raises(ConfigError, match="tool_choice: a call that must be made is held to its schema"):
        intake.chat(ChatBody.model_validate({**free, "tool_choice": "required"}), "r")


def calls(form: Any = HERMES, **more: Any) -> ToolCalls:
    settings: dict[str, Any] = {"tools": [Tool("f", None), Tool("g", ORDER)], "forced": None, "single": False}
    return ToolCalls(**{**settings, **more}, format=form)


def read(reader: CallReader, pieces: list[str]) -> tuple[str, list[Any]]:
    """What the reader makes of the pieces, whose tokens are their characters and an end token without text."""
    text, scored, made = "", "", list[Any]()
    ends = False
    start = 0
    for number, piece in enumerate(pieces):
        final = number == len(pieces) - 1
        stop = start + len(piece)
        tokens = [scored_token(ord(character), place) for place, character in enumerate(piece, start)]
        tokens += [scored_token(0, stop, 0)] if final else []
        start = stop
        for found in reader.read(piece, tokens, final=final):
            if isinstance(found, TextPiece):
                text += found.text
                scored += "".join(chr(settled.token.token_id) for settled in found.scored_tokens)
            else:
                made.append(found)
            ends = isinstance(found, TextPiece)
    assert scored == text + ("\0" if ends or not (text or made) else ""), "the tokens of the text alone"
    return text, [call["function"] for call in join_pieces(made)]


def scored_token(token_id: int, place: int, length: int = 1) -> SettledToken:
    return SettledToken(TokenLogprob(token_id, -1.0, 0), place, place + length, None)


F = {"name": "f", "arguments": '{"é": [1]}'}
HERMES_TEXTS = [
    ("a < b", "a < b", []),
    ("a <tool", "a <tool", []),
    ('a<tool_call>{"name": "f", "arguments": {"é": [1]}}</tool_call>b', "ab", [F]),
    ('<tool_call>\n{"arguments": {"é": [1]}, "name": "f"}\n</tool_call>\n' * 2, "", [F, F]),
    (
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        [],
    ),
    ("<tool_call>no</tool_call> x", "<tool_call>no</tool_call> x", []),
    *(
        (text, text, [])  # which JSON cannot write
        for number in ("NaN", "-Infinity", "1e999")
        for text in [f'<tool_call>{{"name": "f", "arguments": {{"x": {number}}}}}</tool_call>']
    ),
    ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
]
LLAMA_TEXTS = [
    ("plain", "plain", []),
    ('a {"name": "f", "parameters": {}}', 'a {"name": "f", "parameters": {}}', []),
    ('{"name": "f", "parameters": {"é": [1]}}', "", [F]),
    ('{"name": "f"}', '{"name": "f"}', []),
    ('{"a": ', '{"a": ', []),
    ("", "", []),
]
CASES = [(HERMES, *case) for case in HERMES_TEXTS] + [(LLAMA, *case) for case in LLAMA_TEXTS]


@pytest.mark.few(5)
@pytest.mark.parametrize(("form", "said", "text", "made"), CASES)
@given(data=st.data())
def test_calls_are_read_however_their_text_arrives(form: Any, said: str, text: str, made: list[Any], data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    reader = CallReader(calls(form))
    assert read(reader, pieces) == (text, made)
    assert reader.finish_reason("length") == ("tool_calls" if made else "length")


def test_one_call_at_most_where_that_is_asked_for() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(CallReader(calls(single=True)), [f"a{call}", f"b{call}"]) == ("a", [{"name": "f", "arguments": "{}"}])


def test_the_template_says_how_calls_are_written() -> None:
    for template in (None, "{{ messages }}", "{{ tools }}<tool_call>"):
        assert detect_call_format(template) == HERMES
    assert detect_call_format("{{ tools }} as JSON") == LLAMA


COLOUR = {"properties": {"c": {"$ref": "#/$defs/x"}}, "required": ["c"], "$defs": {"x": {"enum": ["red", "blue"]}}}
SHAPE = {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"s": {"const": 1}}, "required": ["s"]}}}


def test_each_schema_has_definitions_of_its_own() -> None:
    several = calls(tools=[Tool("f", COLOUR), Tool("g", SHAPE)], forced="required").constraint
    for name, arguments in (("f", '{"c": "red"}'), ("f", '{"c": "blue"}'), ("g", '{"s": 1}')):
        assert re.fullmatch(several.source.expression, f'{{"name": "{name}", "arguments": {arguments}}}')
    for name, arguments in (("f", '{"s": 1}'), ("g", '{"c": "red"}'), ("g", "{}"), ("g", "[]")):
        assert not re.fullmatch(several.source.expression, f'{{"name": "{name}", "arguments": {arguments}}}')


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (None, "{}", '{"a": 1}'),
        ({}, "{}", '{"a": 1}'),
        ({"type": "object", "description": "none"}, "{}", '{"a": 1}'),
        ({"type": "object", "properties": {}, "additionalProperties": False}, "{}", '{"a": 1}'),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"a": 1}', '{"a": "x"}'),
        ({"anyOf": [ORDER, {"type": "null"}]}, '{"who": "Nina", "price": 5}', "null"),
        (SHAPE, '{"s": 1}', "{}"),
        (COLOUR, '{"c": "red"}', "{}"),
        ({"type": ["object", "null"], "properties": {"a": {"const": 1}}, "required": ["a"]}, '{"a": 1}', "null"),
    ],
)
def test_arguments_are_an_object_of_their_schema(parameters: Any, right: str, wrong: str) -> None:
    form = calls(tools=[Tool("f", parameters)], forced="named").constraint.source.expression
    assert re.fullmatch(form, right)
    assert not re.fullmatch(form, wrong)


def test_schemas_that_are_too_long_together_are_those_of_tools() -> None:
    long = {"type": "object", "properties": {}, "description": "x" * 2000}
    with pytest.raises(ConfigError, match=r"^tools: the choice between all tools cannot be g"):
        _ = calls(tools=[Tool(f"f{number}", long) for number in range(10)], forced="required").constraint


@pytest.mark.parametrize("kind", ["array", "string", ["string", "null"], 3])
def test_arguments_that_are_no_object_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"the parameters of 'f' have the type .* and arguments are an object"):
        _ = calls(tools=[Tool("f", {"type": kind})], forced="named").constraint


def block_causal(preset: str) -> LLM:
    """A model of random weights that writes bytes, under a template that tells of tools."""
    llm = LLM(preset, load_format="dummy", cache="auto", dtype="float32", device="cpu")
    shape = llm.loaded.config
    tokenizer = byte_tokenizer(shape.vocab, shape.mask_id, shape.stop_ids)
    tokenizer.use_chat_template(TEMPLATE.replace("{{ tools | tojson }}", "{{ tools | length }}"))
    llm.session.loaded = replace(llm.loaded, tokenizer=tokenizer)
    return llm


PRESETS = ("sdar-tiny", "llada2-tiny", "fast-dllm-v2-tiny")


@pytest.fixture(
    scope="module",
    params=[pytest.param(PRESETS[0]), *(pytest.param(p, marks=pytest.mark.thorough) for p in PRESETS[1:])],
)
def blocks(request: pytest.FixtureRequest) -> Iterator[Running]:
    forms()
    with serving(block_causal(request.param), model_names=["blocks"], sampling={}) as running:
        yield running


COUNT = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 1}}, "required": ["n"]}
FORCED = [("named", "count"), ("required", None), ("only", None)]


@pytest.mark.parametrize(("choice", "name"), FORCED)
def test_block_causal_models_make_calls_on_every_surface(blocks: Running, choice: str, name: str | None) -> None:
    tools = [("count", COUNT), ("order", ORDER)][: 1 if choice == "only" else 2]
    own = {"temperature": 1.0, "seed": 3}
    flat = [{"type": "function", "name": each, "parameters": schema} for each, schema in tools]
    chosen: Any = "required" if name is None else {"type": "function", "name": name}

    def right(name: str, arguments: str) -> bool:
        read = json.loads(arguments)
        return valid(arguments) if name == "order" else read.keys() == {"n"} and 1 <= read["n"] <= 99

    chat = {
        "messages": [{"role": "user", "content": "go"}],
        "max_tokens": 96,
        "tools": [{"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in tools],
        "tool_choice": chosen if name is None else {"type": "function", "function": {"name": name}},
        **own,
    }
    (told,) = blocks.answer(URL, chat)["choices"][0]["message"]["tool_calls"]
    assert right(**told["function"])
    assert name in (None, told["function"]["name"])
    deltas = [c["delta"]["tool_calls"] for k in blocks.stream(chat) for c in k["choices"] if "tool_calls" in c["delta"]]
    assert all(len(each) == 1 for each in deltas), "one entry of an index in a chunk"
    joined = "".join(each[0]["function"]["arguments"] for each in deltas)
    assert (deltas[0][0]["function"]["name"], joined) == (told["function"]["name"], told["function"]["arguments"])

    asked = {"input": "go", "max_output_tokens": 96, "tools": flat, "tool_choice": chosen, **own}
    response = blocks.client.post("/v1/responses", json=asked).json()
    (item,) = response["output"]
    assert (item["type"], response["status"]) == ("function_call", "completed")
    assert response["max_output_tokens"] == 96, "the hole alone, as it was asked for"
    assert (item["name"], item["arguments"]) == (told["function"]["name"], told["function"]["arguments"])
    with blocks.openai() as client:
        events: list[Any] = list(client.responses.create(model="blocks", stream=True, extra_body=asked))
    assert events[-1].response.output[0].arguments == item["arguments"]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == item["arguments"]

    body: Any = {
        "model": "blocks",
        "messages": chat["messages"],
        "max_tokens": 96,
        "tools": [{"name": n, "input_schema": schema} for n, schema in tools],
        "tool_choice": {"type": "any"} if name is None else {"type": "tool", "name": name},
    }
    with blocks.anthropic() as other:
        answer: Any = other.messages.create(**body, extra_body=own)
        with other.messages.stream(**body, extra_body=own) as stream:
            final: Any = stream.get_final_message()
    assert (answer.content[0].name, answer.content[0].input) == (item["name"], json.loads(item["arguments"]))
    assert final.content[0].input == answer.content[0].input
    assert (answer.content[0].type, answer.stop_reason, final.stop_reason) == ("tool_use", "tool_use", "tool_use")


def test_a_call_stands_where_the_model_would_write_it(blocks: Running) -> None:
    """What begins a call is given, so that the model reads it; what ends one stands behind all blocks."""
    (request,) = blocks.service.intake.chat(
        ChatBody.model_validate({**ASK, "tools": [BUY], "tool_choice": "required", "block_length": None}), "r"
    )
    assert request.template is not None
    hole = request.template.holes[0]
    given = blocks.service.intake.tokenizer.decode(request.template.tokens[: hole.start])
    assert given == '<tool_call>\n{"name": "buy", "arguments": '
    assert hole.stop == len(request.template)


HOSTED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/chat/completions", {"tools": [BUY, {"type": "web_search_preview", "search_context_size": "low"}]},
     ["web_search_preview"]),
    ("/v1/responses", {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "web_search"}]},
     ["code_interpreter", "web_search"]),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}, {"type": "web_search_call", "id": "w"}]},
     ["web_search_call"]),
    ("/v1/messages", {"tools": [{"name": "buy", "input_schema": ORDER},
                                {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}]},
     ["web_search_20250305"]),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "I"}]}]},
     ["server_tool_use"]),
]  # fmt: skip
PICKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"tool_choice": "required"}, "a call of web_search_preview"),
    ("/v1/chat/completions", {"tool_choice": {"type": "web_search_preview"}}, "'web_search_preview'"),
    ("/v1/responses", {"tool_choice": {"type": "mcp", "server_label": "a"}}, "'mcp'"),
    ("/v1/messages", {"tool_choice": {"type": "tool", "name": "search"}}, "web_search_preview"),
    ("/v1/messages/count_tokens", {"tool_choice": {"type": "any"}}, "a call of web_search_preview"),
]


def test_tools_that_other_servers_run_are_left_out_unless_they_are_picked(taught: Running) -> None:
    for url, fields, left_out in HOSTED:
        said = {"input": "x"} if url == "/v1/responses" else {"messages": ASK["messages"]}
        body = {**said, "max_tokens": 4, "tool_choice": {"type": "auto"} if "messages" in url else "auto", **fields}
        assert taught.answer(url, body)["remask"]["left_out"] == left_out
        with taught.client.stream("POST", url, json={**body, "stream": True}) as stream:
            assert stream.headers["X-Remask-Left-Out"] == ",".join(left_out)
            stream.read()
        if url == "/v1/chat/completions":
            rendered = taught.client.post(f"{url}/render", json=body)
            assert rendered.headers["X-Remask-Left-Out"] == ",".join(left_out)
    for url, fields, picked in PICKED:
        said = {"input": "x"} if url == "/v1/responses" else {"messages": ASK["messages"]}
        tools = [{"type": "web_search_preview", "name": "search"}]
        told = taught.refusal(url, {**said, "tools": tools, **fields})
        assert picked in told["message"]
        assert "the server runs no tools: offer a function" in told["message"]


@pytest.fixture(scope="module")
def untold() -> Iterator[Running]:
    """The bundled model whose bytes spell everything, under its own template, which knows nothing of tools."""
    llm = LLM("bundled-tariff", cache="none", dtype="float32", device="cpu")
    with serving(llm, model_names=["bundled-tariff"], sampling={}) as running:
        yield running


@pytest.mark.thorough
def test_without_a_tool_template_the_form_chooses_between_words_and_calls(untold: Running) -> None:
    """Whichever it is follows its form, in streams too; a client goes on with the result."""
    forms()
    body = {**ASK, "max_tokens": 80, "block_length": 80, "tools": [BUY, STOP], "temperature": 1.2, "n": 4, "seed": 0}
    whole = untold.chat(body).json()["choices"]
    streamed = untold.stream(body)
    for number, choice in enumerate(whole):
        calls = choice["message"].get("tool_calls", [])
        assert (choice["finish_reason"] == "tool_calls") == bool(calls)
        assert all(call["function"]["name"] == "stop" or valid(call["function"]["arguments"]) for call in calls)
        parts = [each for event in streamed for each in event["choices"] if each["index"] == number]
        assert "".join(each["delta"].get("content") or "" for each in parts) == (choice["message"]["content"] or "")
        made = [call["function"] for each in parts for call in each["delta"].get("tool_calls", [])]
        assert made == [call["function"] for call in calls]
    # What may be said in words can be made improbable, so that a call is made.
    letter = untold.service.intake.tokenizer.encode("z", add_special_tokens=False)[0]
    for weight, single in ((-100, True), (-100, False), (100, True)):
        fields = {"logit_bias": {str(letter): weight}, "parallel_tool_calls": not single, "n": 1}
        asked = {**body, **fields, "structured_outputs": {"regex": "z{20,}"}, "temperature": 0}
        (choice,) = untold.chat(asked).json()["choices"]
        calls = choice["message"].get("tool_calls", [])
        assert (len(calls) == 1 if single else calls) if weight < 0 else not calls
        assert calls or set(choice["message"]["content"]) == {"z"}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "stop"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    told = untold.chat({**body, "messages": turns, "n": 1, "return_token_ids": True}).json()
    text = untold.service.intake.tokenizer.decode(told["prompt_token_ids"])
    for said in ('"description": "Buys."', '<tool_call>\n{"name": "stop", "arguments": {}}', "<tool_response>\ndone"):
        assert said in text
    assert "send one of them" in untold.chat({**body, "suffix": "x"}).json()["error"]["message"]
    flat = {"type": "function", "name": "buy", "parameters": ORDER}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": "x", "tools": [flat]}),
        ("/v1/messages", {"messages": ASK["messages"], "tools": [{"name": "buy", "input_schema": ORDER}]}),
    ]
    for url, asked in bodies:
        assert untold.client.post(url, json={**asked, "max_tokens": 80, "block_length": 80}).status_code == 200


def test_a_choice_of_form_is_read_as_it_was_made() -> None:
    made = calls(forced="choice")
    call = '<tool_call>\n{"name": "f", "arguments": {"é": [1]}}\n</tool_call>'
    assert re.fullmatch(made.constraint.source.expression, call.replace('"é": [1]', ""), re.DOTALL)
    for pieces, text, found in (
        ([call[:3], call[3:30], f"{call[30:]}\n{call}"], "", [F, F]),
        ([f"a{call[:5]}", call[5:]], f"a{call}", []),
        (["", f" {call}"], f" {call}", []),
        (["a", "", "b"], "ab", []),
        ([""], "", []),
    ):
        assert read(CallReader(made), pieces) == (text, found)


def test_the_choice_by_form_may_be_turned_off() -> None:
    llm = LLM("bundled-tariff", cache="none", dtype="float32", device="cpu")
    intake = Intake(llm, ServerConfig(model_names=["bundled-tariff"], tools_by_form=False))
    with pytest.raises(ConfigError, match="does not tell it of tools"):
        intake.chat(ChatBody.model_validate({**ASK, "tools": [BUY]}), "r")
