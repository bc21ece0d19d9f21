"""Every field of OpenAI's and vLLM's bodies has a fate, and what everyday clients send is answered."""

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from remask.errors import ConfigError
from remask.server.fields import FOREIGN, HONOURED, read_fields
from remask.server.protocol.generation import ChatBody, CompletionBody
from tests.server.serving import CHATS, Running

OPENAI: dict[str, type[Any]] = {
    "chat": chat_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
}
# Beside OpenAI's, the fields of vLLM's two bodies.
VLLM = [
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "media_io_kwargs",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "reasoning",
    "repetition_penalty",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structural_tag",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
]
OWN = {*ChatBody.model_fields, *CompletionBody.model_fields}


@pytest.mark.parametrize("endpoint", OPENAI)
def test_every_field_of_the_official_client_has_a_fate(endpoint: str) -> None:
    names = {*get_type_hints(OPENAI[endpoint]), "stream"}
    assert len(names) > 15
    assert names <= HONOURED.keys() | FOREIGN.keys()


def test_every_field_of_vllm_has_a_fate() -> None:
    assert set(VLLM) <= HONOURED.keys() | FOREIGN.keys()


def test_the_table_says_what_is_so() -> None:
    assert HONOURED.keys() <= OWN
    assert OWN.isdisjoint(FOREIGN)
    assert all(field.reason for field in FOREIGN.values())


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_ignored_and_what_is_refused(name: str) -> None:
    field = FOREIGN[name]
    values: list[Any] = [True, 7, "x", [1], {"a": 1}]
    if field.ignored:
        assert all(read_fields({name: value}, ()) == {} for value in values)
        return
    for value in (None, *(field.neutral or ())):
        assert read_fields({name: value}, ()) == {}
    for value in [value for value in values if value not in (field.neutral or ())]:
        with pytest.raises(ConfigError, match=f"^{name} is not supported: ") as refused:
            read_fields({name: value}, ())
        assert field.reason in str(refused.value)


CALL = {"id": "call_1", "type": "function", "function": {"name": "next_stop", "arguments": '{"line": 4}'}}
TOOL = {"type": "function", "function": {"name": "next_stop", "parameters": {"type": "object"}}}
EVERYDAY: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"top_k": -1},
    {"top_k": 0},
    {"min_p": 0},
    {"min_p": 0.0, "length_penalty": 1.0, "use_beam_search": False, "repetition_penalty": 1.0, "min_tokens": 0},
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
    before = tokenizer._backend.chat_template
    tokenizer.use_chat_template(template)
    messages = [
        CHATS[0][1],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "arch"},
    ]
    try:
        body = {"messages": messages, "chat_template_kwargs": {"place": "here"}, "add_generation_prompt": False}
        tokens = server.client.post("/tokenize", json=body).json()["tokens"]
        text = tokenizer.render_chat(
            [message.rendered for message in ChatBody.model_validate(body).messages], False, {"place": "here"}
        )
        assert server.chat({**body, "max_tokens": 2}).json()["usage"]["prompt_tokens"] == len(tokens)
    finally:
        tokenizer.use_chat_template(before)
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
