"""`/v1/messages` by Anthropic's client: the same answers as chat's, and every event and error that it expects."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
from pydantic import ValidationError

from remask.answers.answer import Delta
from remask.server.answers.messages import MessagesAnswer
from remask.server.errors import ApiError
from remask.server.protocol.messages import FOREIGN_TO_MESSAGES, CountTokensBody, MessagesBody
from remask.server.tools import CallPiece
from tests.server.described import events
from tests.server.serving import CHATS, Running, serving
from tests.server.test_tools import ORDER, saying

if TYPE_CHECKING:  # it takes seconds to import, which only what runs here should pay
    from anthropic import Anthropic

PATH = "/v1/messages"
SYSTEM, USER = CHATS[0][0]["content"], CHATS[0][1]
ASKED: dict[str, Any] = {"model": "bundled-transit", "system": SYSTEM, "messages": [USER], "max_tokens": 16}
TOOL = {"name": "buy", "description": "Buys.", "input_schema": ORDER, "cache_control": {"type": "ephemeral"}}
OTHER = {"name": "stop", "input_schema": {"type": "object", "properties": {}}}
HELLO = [{"role": "user", "content": "x"}]


@pytest.fixture
def client(server: Running) -> "Iterator[Anthropic]":
    with server.anthropic() as made:
        yield made


def test_an_answer_is_that_of_chat(client: "Anthropic", server: Running) -> None:
    chat = server.ask().json()
    answer = client.messages.create(**ASKED)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == chat["choices"][0]["message"]["content"]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    read = usage.cache_read_input_tokens or 0
    assert usage.input_tokens + read == chat["usage"]["prompt_tokens"]
    assert read == 246, "the conversation before the question has been stored by chat"
    assert usage.output_tokens == chat["usage"]["completion_tokens"]
    counted = client.messages.count_tokens(model="bundled-transit", system=SYSTEM, messages=ASKED["messages"])
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_the_events_of_a_stream(client: "Anthropic") -> None:
    whole = client.messages.create(**ASKED)
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    deltas = kinds.count("content_block_delta")
    begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == begin + ["content_block_delta"] * deltas + end
    assert deltas > 1
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_fixed_parts_are_input_from_the_first_event_on(server: Running) -> None:
    body = {"system": SYSTEM, "messages": [USER], "canvas": [{"text": "go"}, {"mask": 2}], "stream": True}
    told = [*events(server.client.post(PATH, json=body).text)]
    first, last = told[0]["message"]["usage"], told[-2]["usage"]
    assert first["input_tokens"] == last["input_tokens"] + last["cache_read_input_tokens"]


def test_why_an_answer_ends(client: "Anthropic") -> None:
    cut = client.messages.create(**{**ASKED, "stop_sequences": ["nowhere", " ##"]})
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", " ##")
    short = client.messages.create(**{**ASKED, "max_tokens": 8}, extra_body={"ignore_eos": True})
    assert (short.stop_reason, short.stop_sequence, short.usage.output_tokens) == ("max_tokens", None, 8)


def test_calls_that_the_model_makes_stand_behind_its_text(taught: Running) -> None:
    call = '<tool_call>\n{"name": "buy", "arguments": {"who": "Nina", "price": 5}}\n</tool_call>'
    turn = {"role": "user", "content": "Buy it"}
    tools = [{**TOOL, "description": "Buys."}, OTHER]
    body = {"messages": [turn], "tools": tools}
    with saying(taught, f"Sure. {call}"):
        told = taught.client.post(PATH, json=body).json()
    assert "content" in told, told
    text, made = told["content"]
    assert text == {"type": "text", "text": "Sure. "}
    assert (made["type"], made["name"], made["input"]) == ("tool_use", "buy", {"who": "Nina", "price": 5})
    assert told["stop_reason"] == "tool_use"


def test_white_space_before_a_call_is_no_text() -> None:
    answer = object.__new__(MessagesAnswer)
    answer.parts, answer._part_is_open, answer._pending_text, answer._pending_tokens = [], False, "", []
    for delta in (Delta(0, "\n"), Delta(0, calls=[CallPiece(0, "{}", "c", "f")]), Delta(0, "Done.")):
        answer._add_delta(delta)
    assert [part.text for part in answer.parts] == ["{}", "Done."]


def test_a_conversation_may_be_sent_back() -> None:
    control = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    marked = {"type": "text", "text": "Done?", "cache_control": control}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Buy "}, {"type": "text", "text": "it"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "any", "signature": "s"},
                {"type": "text", "text": "Sure.", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "buy", "input": {"price": 5}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{**marked, "text": "sold"}]},
                marked,
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = MessagesBody.model_validate({"messages": turns, "system": system, "context_management": edits})
    counted = CountTokensBody.model_validate({"messages": turns, "system": system, "context_management": {"edits": []}})
    assert counted.chat.messages == body.chat.messages
    messages = body.chat.messages
    rendered = [message.rendered for message in messages]
    assert [each["role"] for each in rendered] == ["system", "user", "assistant", "tool", "user"]
    assert [each["content"] for each in rendered] == ["Be brief.", "Buy it", "Sure.", "sold", "Done?"]
    assert rendered[2]["tool_calls"][0]["function"] == {"name": "buy", "arguments": {"price": 5}}
    assert rendered[3]["tool_call_id"] == "t1"
    assert [message.cache_control is not None for message in messages] == [True] + [False] * 2 + [True] * 2


def test_the_other_fields_are_those_of_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = MessagesBody.model_validate(
        {
            "messages": HELLO,
            "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["a"],
            "steps": 4,
        }
    ).chat
    assert chat.terms.structured_outputs is not None
    assert chat.terms.structured_outputs.json == schema
    assert chat.sampling == {"stop": ("a",), "steps": 4} or chat.sampling == {"stop": ["a"], "steps": 4}
    assert chat.user == "u"
    for choice, wanted in (("any", "required"), ("auto", "auto"), ("none", "none")):
        body = MessagesBody.model_validate({"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": choice}})
        assert body.chat.tool_choice == wanted
    for single in (True, False):
        only = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": single}}
        body = MessagesBody.model_validate({"messages": HELLO, "tools": [TOOL], **only})
        assert body.chat.parallel_tool_calls is not single


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "read and write text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
         "of the role 'assistant'"),
        ({"tools": [{"type": "web_serch_20250305", "name": "web_search"}]}, "the server runs no tools"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'clear_tool_uses_20250919'"),
        ({"context_managment": {}}, "Unknown field 'context_managment'"),
        ({"mcp_servers": [{"type": "url"}]}, "the server runs no tools"),
        ({"tool_choice": {"type": "tool"}}, "go together"),
        ({"stop": "a", "stop_sequences": ["b"]}, "two names of one thing"),
        ({"max_tokens": 0}, "max_tokens must be a whole number"),
        ({"top_logprobs": 0}, "top_logprobs: answers of this API have no place for it"),
        ({"return_trace": True}, "return_trace: answers of this API have no place for it"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        MessagesBody.model_validate({"messages": HELLO, **fields})
    assert told in str(refused.value)


def test_every_field_of_the_official_client_has_a_fate() -> None:
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta_create_params

    known = MessagesBody.model_fields.keys() | FOREIGN_TO_MESSAGES.keys()
    for params in (message_create_params, beta_create_params):
        names = {*get_type_hints(params.MessageCreateParamsBase), "stream"}
        assert len(names) > 15
        assert names <= known
    counted = set(get_type_hints(message_count_tokens_params.MessageCountTokensParams))
    assert counted <= CountTokensBody.model_fields.keys() | FOREIGN_TO_MESSAGES.keys()
    assert MessagesBody.model_fields.keys().isdisjoint(FOREIGN_TO_MESSAGES)


def test_errors_have_the_classes_that_clients_catch(client: "Anthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASKED, "model": "nobody"})
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == missing.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASKED, extra_body={"temperature": -1})
    sent = object.__new__(MessagesAnswer)._error_event(ApiError(504, "too late")).decode()
    assert sent.startswith('event: error\ndata: {"type":"error","error":{"type":"timeout_error","message":"too late"}')


def test_the_key_is_sent_as_anthropic_does() -> None:
    import anthropic

    with serving(api_keys=["s3cret"]) as running:
        with running.anthropic("s3cret") as client:
            assert client.messages.create(**ASKED).content
        client = running.anthropic("wrong")
        with client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(**ASKED)
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"
