"""`/v1/responses` by the official client: the same answers as chat's, and every event that it expects."""

from importlib import import_module
from typing import Any, get_type_hints

import openai
import pytest
from openai.types.responses import response_create_params
from pydantic import ValidationError

from remask.server.answers.responses import ResponsesAnswer
from remask.server.errors import FIELDS, ApiError
from remask.server.protocol.responses import FOREIGN_TO_RESPONSES, ResponsesBody
from tests.server.serving import CHATS, Running
from tests.server.test_tools import ASK, ORDER, saying

PATH = "/v1/responses"
BUYS: Any = {"type": "function", "name": "buy", "description": "Buys.", "parameters": ORDER, "strict": True}
STOPS: Any = {"type": "function", "name": "stop"}
TEXT_EVENTS = ["response.output_item.added", "response.content_part.added", "response.output_text.delta"]
TEXT_ENDS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def asked(running: Running, **fields: Any) -> dict[str, Any]:
    own = {name: value for name, value in ASK.items() if name != "messages"}
    return running.answer(PATH, {"input": "Buy it", **own, **fields})


def kinds(events: list[Any]) -> list[str]:
    """Their types, those that repeat once."""
    found = [event.type for event in events]
    return [kind for place, kind in enumerate(found) if place == 0 or kind != found[place - 1]]


def test_an_answer_is_that_of_chat(client: openai.OpenAI, server: Running) -> None:
    system, user = CHATS[0]
    chat = server.ask().json()
    answer = client.responses.create(model="bundled-transit", instructions=system["content"], input=user["content"])
    again: Any = [system, user]
    assert client.responses.create(model="bundled-transit", input=again).output_text == answer.output_text
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert answer.max_output_tokens == 16


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
    turns: Any = CHATS[0]
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = client.responses.create(model="bundled-transit", input=turns, **fields)
    events: list[Any] = list(client.responses.create(model="bundled-transit", input=turns, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    begins, ends = ["response.created", "response.in_progress"], ["response.completed"]
    assert kinds(events) == begins + TEXT_EVENTS + TEXT_ENDS + ends
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens
    content: Any = whole.output[0].content
    scored = content[0].logprobs
    assert [each.token for event in deltas for each in event.logprobs] == [each.token for each in scored]
    assert all(len(each.top_logprobs) == 1 for each in scored)


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    turns: Any = CHATS[0]
    more = {"ignore_eos": True}
    answer = client.responses.create(model="bundled-transit", input=turns, max_output_tokens=8, extra_body=more)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8


def test_calls_that_the_model_makes_stand_behind_its_text(taught: Running) -> None:
    call = '<tool_call>\n{"name": "buy", "arguments": {"who": "Nina", "price": 5}}\n</tool_call>'
    with saying(taught, f"Sure. {call}\n{call}"):
        response = taught.client.post(PATH, json={"input": "Buy it", "tools": [BUYS, STOPS]})
    first, *calls = response.json()["output"]
    assert first["content"][0]["text"] == "Sure. "
    assert [each["arguments"] for each in calls] == ['{"who": "Nina", "price": 5}'] * 2
    assert len({each["call_id"] for each in calls}) == 2


def test_a_conversation_may_be_sent_back() -> None:
    said = {"type": "output_text", "text": "One ", "annotations": [], "logprobs": [], "parsed": {"a": 1}}
    refused = {"type": "refusal", "refusal": "moment."}
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "buy",
        "arguments": "{}",
        "status": "completed",
    }
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Buy "}, {"type": "input_text", "text": "it"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"text": "any"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [said, refused]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    chat = ResponsesBody.model_validate({"input": items, "instructions": "Be brief."}).chat
    rendered = [message.rendered for message in chat.messages]
    assert [each["role"] for each in rendered] == ["system", "user", "assistant", "tool"]
    assert [each["content"] for each in rendered] == ["Be brief.", "Buy it", "One moment.", "done"]
    assert [each["id"] for each in rendered[2]["tool_calls"]] == ["c1", "c2"]
    assert rendered[3]["tool_call_id"] == "c1"


def test_the_form_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    body = ResponsesBody.model_validate({"input": "x", "text": {"format": form, "verbosity": "low"}})
    assert body.chat.terms.structured_outputs is not None
    assert body.chat.terms.structured_outputs.json == schema


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"store": True}, "nothing is kept beyond an answer"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation as `input`"),
        ({"background": True}, "the connection that asked"),
        ({"truncation": "auto"}, "too long is an error"),
        ({"input": IMAGE}, "read and write text alone"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "nothing is kept"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "the server runs no tools"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "calls have arguments of a schema"),
        ({"max_output_tokens": 0}, "max_output_tokens must be a whole number"),
        ({"max_output_tokens": 3, "max_tokens": 4}, "two names of one thing"),
        ({"text": {"format": {"type": "json_schema"}}}, "go together"),
        ({"inputs": "x"}, "Did you mean 'input'"),
        ({"return_step_maps": True}, "return_step_maps: answers of this API have no place for it"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ResponsesBody.model_validate({"input": "x", **fields})
    assert told in str(refused.value)


def test_every_field_of_the_official_client_has_a_fate() -> None:
    names = {*get_type_hints(response_create_params.ResponseCreateParamsBase), "stream"}
    assert len(names) > 20
    assert names <= ResponsesBody.model_fields.keys() | FOREIGN_TO_RESPONSES.keys()
    assert ResponsesBody.model_fields.keys().isdisjoint(FOREIGN_TO_RESPONSES)
    assert names <= FIELDS


def test_a_stream_that_fails_raises_in_the_official_client() -> None:
    """The last event of a stream, as a client gets it that has begun to read."""
    answer = object.__new__(ResponsesAnswer)
    answer._sequence_number = 7
    sent = answer._error_event(ApiError(504, "too late"))
    httpx = import_module(openai.DefaultHttpxClient.__bases__[0].__module__)  # httpx2 from openai 3 on
    events = httpx.Response(200, content=sent, headers={"content-type": "text/event-stream"})
    transport = httpx.MockTransport(lambda _: events)
    client = openai.OpenAI(api_key="any", max_retries=0, http_client=httpx.Client(transport=transport))
    with client, pytest.raises(openai.APIError, match="too late") as failed:
        list(client.responses.create(model="any", input="x", stream=True))
    assert failed.value.code == "deadline_exceeded"
    assert b'"sequence_number":7' in sent
