"""LangChain's ChatOpenAI against the server, as its users set it up."""

import json
from typing import Any

import pytest

from remask.llm import LLM
from tests.server.serving import CHATS, Running, serving
from tests.server.test_tools import TEMPLATE
from tests.test_structure import ROBOT

langchain = pytest.importorskip("langchain_openai", reason="needs LangChain: pip install langchain-openai")
pytestmark = pytest.mark.filterwarnings("ignore")  # other packages' own


def chat(running: Running, **fields: Any) -> Any:
    model = running.service.config.model_names[0]
    return langchain.ChatOpenAI(base_url=f"{running.base}/v1", api_key="any", model=model, max_retries=0, **fields)


def test_it_is_answered_and_streams(server: Running) -> None:
    system, user = (message["content"] for message in CHATS[0])
    turns = [("system", system), ("human", user)]
    whole = chat(server, temperature=0.0, logprobs=True, top_logprobs=2).invoke(turns)
    assert whole.content == server.ask().json()["choices"][0]["message"]["content"]
    assert whole.usage_metadata["input_tokens"] > 200
    assert len(whole.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert "".join(chunk.content for chunk in chat(server, stream_usage=True).stream(turns)) == whole.content
    more = chat(server, extra_body={"max_tokens": 4, "ignore_eos": True}).batch([turns, turns])
    assert [each.usage_metadata["output_tokens"] for each in more] == [4, 4]


def test_with_structured_output() -> None:
    llm = LLM("bundled", dtype="float32", device="cpu")
    with serving(llm, model_names=["bundled"], sampling={}) as running:
        asked = chat(running, max_tokens=48).with_structured_output(ROBOT, method="json_schema", include_raw=True)
        told = asked.invoke("a robot")
        assert told["parsing_error"] is None
        assert told["parsed"] == json.loads(told["raw"].content)
        assert set(told["parsed"]) == {"name", "on", "legs"}


def test_bind_tools() -> None:
    """A forced call, whole and streamed; a free one that is not made is text."""
    llm = LLM("bundled", dtype="float32", device="cpu")
    assert llm.tokenizer is not None
    llm.tokenizer.use_chat_template(TEMPLATE)
    with serving(llm, model_names=["bundled"], sampling={}) as running:
        made = chat(running, max_tokens=48)
        robot = {"name": "robot", "description": "A robot.", "parameters": ROBOT}
        forced = made.bind_tools([robot], tool_choice="robot")
        (call,) = forced.invoke("a robot").tool_calls
        assert call["name"] == "robot"
        assert set(call["args"]) == {"name", "on", "legs"}
        first, *rest = forced.stream("a robot")
        whole = first
        for chunk in rest:
            whole = whole + chunk
        assert [each["args"] for each in whole.tool_calls] == [call["args"]]
        assert made.bind_tools([robot], tool_choice="any").invoke("a robot").tool_calls[0]["args"] == call["args"]
        free = chat(running, max_tokens=8).bind_tools([robot]).invoke("a robot")
        assert isinstance(free.content, str)
        told = made.with_structured_output(ROBOT | {"description": "A robot."}, method="function_calling").invoke("one")
        assert set(told) == {"name", "on", "legs"}
