"""What everyday clients send is answered, and what is not supported is ignored or refused."""

from typing import Any

import pytest

from remask.checkpoint.tokenizer import byte_tokenizer
from remask.errors import ConfigError
from remask.server.fields import FOREIGN
from remask.server.protocol.base import read_fields
from remask.server.protocol.generation import ChatBody
from remask.server.protocol.messages import MessagesBody
from remask.server.protocol.responses import ResponsesBody
from tests.server.serving import CHATS, URL, Running, under_template


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_ignored_and_what_is_refused(name: str) -> None:
    field = FOREIGN[name]
    values: list[Any] = [True, 7, "x", [1], {"a": 1}]
    if field.neutral is None:
        assert all(read_fields({name: value}, (), FOREIGN) == {} for value in values)
        return
    for value in (None, *(field.neutral or ())):
        assert read_fields({name: value}, (), FOREIGN) == {}
    for value in [value for value in values if value not in (field.neutral or ())]:
        with pytest.raises(ConfigError, match=f"^{name} is not supported: ") as refused:
            read_fields({name: value}, (), FOREIGN)
        assert field.reason in str(refused.value)


CALL = {"id": "call_1", "type": "function", "function": {"name": "next_stop", "arguments": '{"line": 4}'}}
TOOL = {"type": "function", "function": {"name": "next_stop", "parameters": {"type": "object"}}}
EVERYDAY: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"top_k": -1},
    {"top_k": 0},
    {"min_p": 0, "min_tokens": 0},
    {"min_p": 0.0, "length_penalty": 1.0, "use_beam_search": False, "repetition_penalty": 1.0, "presence_penalty": 0},
    {"metadata": {"run": "7"}, "store": True, "prompt_cache_key": "k", "safety_identifier": "u"},
    {"reasoning_effort": "high", "verbosity": "low", "service_tier": "flex", "request_id": "r"},
    {"include_stop_str_in_output": True, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"logprobs": True, "top_logprobs": 5},
    {"logprobs": False, "top_logprobs": 0},
    {"stream_options": None, "logit_bias": {}, "best_of": 1, "prompt_logprobs": None, "add_generation_prompt": True},
]


@pytest.mark.few(3)
@pytest.mark.parametrize("fields", EVERYDAY, ids=lambda fields: ",".join(fields)[:50])
def test_what_everyday_clients_send_changes_nothing(server: Running, fields: dict[str, Any]) -> None:
    plain = server.ask().json()["choices"][0]["message"]
    told = server.ask(**fields)
    assert told.status_code == 200, told.text
    assert told.json()["choices"][0]["message"] == plain


def test_streams_take_the_options_that_clients_send(server: Running) -> None:
    body = {"messages": CHATS[0], "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert server.stream(body)[-1]["usage"]["completion_tokens"] > 0


def test_each_chunk_tells_the_usage_so_far_if_it_is_asked_for(server: Running) -> None:
    """As vLLM does for load generators; without `include_usage` no chunk tells any."""
    for url, body in (
        ("/v1/chat/completions", {"messages": CHATS[0], "n": 2}),
        ("/v1/completions", {"prompt": ["from ivy", "to oak go"]}),
        ("/v1/completions", {"prompt": "from ivy", "canvas": [{"mask": 4}, {"text": " oak"}, {"mask": 4}]}),
    ):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = server.stream({**body, "stream_options": options}, url)
        told = [chunk["usage"] for chunk in chunks]
        counts = [usage["completion_tokens"] for usage in told]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == last["usage"]["completion_tokens"]
        assert {usage["prompt_tokens"] for usage in told} == {last["usage"]["prompt_tokens"]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in told)
        plain = server.stream({**body, "stream_options": {"continuous_usage_stats": True}}, url)
        assert not any("usage" in chunk for chunk in plain)


def test_seeds_may_be_negative(server: Running) -> None:
    def said(seed: int, **fields: Any) -> Any:
        return server.ask(temperature=100.0, seed=seed, ignore_eos=True, **fields).json()["choices"]

    assert said(-7) == said(-7)
    assert said(-7) != said(-8)
    assert said(-8, n=2)[1]["message"] == said(-7)[0]["message"]
    own = {"temperature": 100.0, "seed": -7, "ignore_eos": True, "max_tokens": 16}
    (output,) = server.llm.generate([CHATS[0]], own, cache="none")
    assert output.text == said(-7, cache="none")[0]["message"]["content"]
    assert len({said(-1)[0]["message"]["content"] for _ in range(4)}) > 1, "it draws one, as in vLLM"


def test_the_largest_seed_draws_what_the_library_draws(server: Running) -> None:
    own: dict[str, Any] = {"temperature": 100.0, "seed": 2**63 - 1, "ignore_eos": True, "max_tokens": 4}
    (output,) = server.llm.generate([CHATS[0]], own, cache="none")
    assert server.ask(**own, cache="none").json()["choices"][0]["message"]["content"] == output.text


def test_an_assistants_turn_may_say_nothing_and_its_reasoning_is_ignored(server: Running) -> None:
    user = CHATS[0][1]
    empty = {"role": "assistant", "content": ""}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "", "reasoning_content": "long", "reasoning": {"a": 1}},
        {"role": "assistant", "content": None, "reasoning_details": [1], "thinking_blocks": [{"type": "thinking"}]},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": ""}],
            "parsed": {"a": 1},
            "id": "m",
            "type": None,
        },
        {
            "role": "assistant",
            "refusal": None,
            "createdAt": "now",
            "provider_specific_fields": {"a": [1]},
            "name": None,
        },
    ]
    prompts = []
    for turn in (empty, *turns):
        body = {"messages": [user, turn, user]}
        told = server.chat({**body, "return_token_ids": True}).json()
        assert told["prompt_token_ids"] == server.client.post("/tokenize", json=body).json()["tokens"]
        prompts.append(told["prompt_token_ids"])
    assert all(each == prompts[0] for each in prompts)


def rendered(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return [message.rendered for message in ChatBody.model_validate({"messages": list(turns)}).messages]


ARGUMENTS: list[tuple[Any, Any]] = [
    ("", {}),
    (" \n", {}),
    (None, {}),
    ("null", {}),
    ({"line": 4}, {"line": 4}),
    ('{"line": 4}', {"line": 4}),
    ('{"line": 4', '{"line": 4'),
    ("4", "4"),
    ('{"line": NaN}', '{"line": NaN}'),
    ('{"line": [-1e999]}', '{"line": [-1e999]}'),
    ({"line": float("inf")}, '{"line": Infinity}'),
    ("[" * 900, "[" * 900),
    ('{"line": 1' + "0" * 5000 + "}", '{"line": 1' + "0" * 5000 + "}"),
]


@pytest.mark.parametrize(("given", "shown"), ARGUMENTS)
def test_arguments_of_a_past_call_are_an_object_or_the_text_that_they_are(given: Any, shown: Any) -> None:
    """On every surface, with whatever clients keep beside a call."""
    function = {"name": "f", "arguments": given, "parsed_arguments": {"line": 4}}
    call: dict[str, Any] = {"id": "c", "type": None, "function": function, "index": 0, "extra_content": {"google": {}}}
    asked, result = {"role": "user", "content": "go"}, {"role": "tool", "tool_call_id": "c", "content": None}
    (_, chat, told) = rendered(asked, {"role": "assistant", "tool_calls": [call], "function_call": None}, result)
    assert told == {"role": "tool", "content": "", "tool_call_id": "c"}
    item = {
        "type": "function_call",
        "call_id": "c",
        "name": "f",
        "arguments": given,
        "parsed_arguments": {},
        "index": 1,
    }
    response = ResponsesBody.model_validate({"input": [item]}).chat.messages[0].rendered
    use = {"type": "tool_use", "id": "c", "name": "f", "input": given, "caller": {"type": "direct"}, "new": 1}
    turns = [{"role": "assistant", "content": [use], "id": "msg_1", "stop_reason": "tool_use", "usage": {"a": 1}}]
    message = MessagesBody.model_validate({"messages": turns}).chat.messages[0].rendered
    expected = {"type": "function", "function": {"name": "f", "arguments": shown}, "id": "c"}
    for turn in (chat, response, message):
        assert turn["tool_calls"] == [expected]
    missing = {"id": "c", "function": {"name": "f"}}
    (turn,) = rendered({"role": "assistant", "tool_calls": [missing]})
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_past_answers_lose_reasoning_and_keep_calls_of_free_text() -> None:
    """On chats and Responses, as other servers' models left them."""
    said = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": None}]
    said += [{"type": "reasoning", "text": "so"}, {"type": "text", "text": "Yes."}]
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "+ a"}}
    (chat,) = rendered({"role": "assistant", "content": said, "tool_calls": [custom]})
    parts = [{"type": "reasoning_text", "text": "hm"}, {"type": "output_text", "text": "Yes."}]
    items: list[dict[str, Any]] = [
        {"role": "assistant", "content": parts},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+ a"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    response, told = ResponsesBody.model_validate({"input": items}).chat.messages
    function = {"name": "patch", "arguments": "+ a"}
    expected = {
        "role": "assistant",
        "content": "Yes.",
        "tool_calls": [{"type": "function", "function": function, "id": "c"}],
    }
    assert chat == response.rendered == expected
    assert told.rendered == {"role": "tool", "content": "done", "tool_call_id": "c"}


def test_a_template_that_takes_no_text_as_arguments_gets_an_object_that_holds_it() -> None:
    tokenizer = byte_tokenizer(300, 299, ())
    broken: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
    }
    broken["tool_calls"][0]["function"]["arguments"] = '{"a": <|mask|>'
    call = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }} "
    for written, text in (
        ("{{ c.function.arguments | tojson }}", 'f "{\\"a\\": <|mask|>"'),
        ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}", 'f {"a": <|mask|>'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", 'f arguments={"a": <|mask|>'),
        (
            "{% if c.function.arguments is mapping %}{{ c.function.arguments | tojson }}{% endif %}",
            'f {"arguments": "{\\"a\\": <|mask|>"}',
        ),
    ):
        tokenizer.use_chat_template(call + written + "{% endfor %}{% endfor %}")
        messages = tokenizer.fit_arguments([broken])
        assert tokenizer.decode(tokenizer.apply_chat(messages, add_generation_prompt=False)) == text


def test_the_developer_speaks_as_the_system(server: Running) -> None:
    system, user = CHATS[0]
    told = server.chat({"messages": [{**system, "role": "developer"}, user]})
    assert told.json()["choices"] == server.ask().json()["choices"]


def test_a_message_may_be_sent_back_as_it_came(server: Running) -> None:
    system, user = CHATS[0]
    said = server.ask().json()["choices"][0]["message"]
    whole = said | {"annotations": [], "audio": None, "function_call": None, "tool_calls": None, "refusal": None}
    texts = [
        server.client.post("/tokenize", json={"messages": [system, user, each, user]}).json()["tokens"]
        for each in (whole, {"role": "assistant", "content": said["content"]})
    ]
    assert texts[0] == texts[1]


def test_calls_of_tools_reach_the_template(server: Running) -> None:
    """With their arguments as objects, as templates expect them; the content that is null as an empty text."""
    template = (
        "{% for m in messages %}{{ m.role }} : {{ m.content }} {{ m.tool_call_id }}"
        "{% for c in m.tool_calls %} call {{ c.function.name }} {{ c.function.arguments.line + 1 }} {{ c.id }}"
        "{% endfor %}"
        " ; {% endfor %}{{ place }}{% if add_generation_prompt %} answer{% endif %}"
    )
    tokenizer = server.service.intake.tokenizer
    messages = [
        CHATS[0][1],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "arch"},
    ]
    body = {"messages": messages, "chat_template_kwargs": {"place": "here"}, "add_generation_prompt": False}
    with under_template(tokenizer, template):
        tokens = server.client.post("/tokenize", json=body).json()["tokens"]
        text = tokenizer.render_chat(
            [message.rendered for message in ChatBody.model_validate(body).messages],
            add_generation_prompt=False,
            variables={"place": "here"},
        )
        assert server.chat({**body, "max_tokens": 2}).json()["usage"]["prompt_tokens"] == len(tokens)
    assert text.endswith("assistant :   call next_stop 5 call_1 ; tool : arch call_1 ; here")
    assert tokens == tokenizer.encode(text, add_special_tokens=False)


def test_the_shared_prefix_is_rendered_with_the_same_variables(server: Running) -> None:
    template = "{{ place }} {% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer = server.service.intake.tokenizer
    before = tokenizer._backend.chat_template
    tokenizer.use_chat_template(template)
    try:
        messages = [{"role": "system", "content": "abbey acorn"}, {"role": "user", "content": "arch"}]
        assert tokenizer.shared_prefix(messages, variables={"place": "alder"}) == 3
        assert tokenizer.prefix_through(messages, 0, variables={"place": "alder"}) == 3
    finally:
        tokenizer.use_chat_template(before)


def test_a_long_variable_counts_as_text(server: Running) -> None:
    long = {"place": "x" * 70_000}
    told = server.ask(chat_template_kwargs=long)
    assert told.status_code == 400
    assert "characters" in told.json()["error"]["message"]


def test_the_stop_text_stays_where_asked(server: Running) -> None:
    whole = server.ask(ignore_eos=True).json()["choices"][0]["message"]["content"]
    word = whole.split()[2]
    cut = server.ask(stop=word, ignore_eos=True).json()["choices"][0]["message"]["content"]
    kept = server.ask(stop=word, ignore_eos=True, include_stop_str_in_output=True)
    assert kept.json()["choices"][0]["message"]["content"] == cut + word
    body = {"messages": CHATS[0], "stop": word, "ignore_eos": True, "include_stop_str_in_output": True}
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in server.stream(body)]
    assert "".join(parts) == cut + word


def test_what_pings_is_answered(server: Running) -> None:
    health = server.client.get("/health").json()
    assert server.client.get("/ping").json() == server.client.post("/ping").json() == health
    assert health["status"] == "ok"
    assert health["computing"]["attention"] == "torch"
    assert health["computing"]["attention_why"] == "auto: device cpu"


def test_sampling_parameters_stand_in_an_object_too(server: Running) -> None:
    """As in a JSONL line, on each API that generates."""
    own = {"max_tokens": 6, "temperature": 0.5, "seed": 7, "top_k": -1}
    asked = {"messages": [{"role": "user", "content": "hello"}]}
    for path, body in (
        (URL, asked),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", asked),
    ):
        flat, nested = (server.client.post(path, json=body | more) for more in (own, {"sampling": own}))
        assert flat.status_code == nested.status_code == 200, nested.text
        assert _texts(flat.json()) == _texts(nested.json()) != []


def _texts(answer: object) -> list[str]:
    if isinstance(answer, list):
        return [text for each in answer for text in _texts(each)]
    if not isinstance(answer, dict):
        return []
    own = [answer[key] for key in ("text", "content") if isinstance(answer.get(key), str)]
    return own + [text for each in answer.values() for text in _texts(each)]
