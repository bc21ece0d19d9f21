"""What guidellm and vLLM's benchmark client send is answered: docs/load.md has their commands."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Running

PAGE = Path(__file__).parents[2] / "docs" / "load.md"
TEXT = "from ivy go 2 , where am i ?"
STREAMED: dict[str, Any] = {"model": "bundled-transit", "stream": True, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm": (
        "/v1/chat/completions",
        {
            **STREAMED,
            "messages": MESSAGES,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 16,
            "ignore_eos": True,
        },
    ),
    "vllm bench serve": (
        "/v1/chat/completions",
        {**STREAMED, "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0.0, "ignore_eos": True},
    ),
    "vllm bench serve, of texts": (
        "/v1/completions",
        {
            **STREAMED,
            "prompt": TEXT,
            "max_tokens": 16,
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": None,
            "ignore_eos": True,
        },
    ),
}


@pytest.mark.parametrize("client", BODIES)
def test_their_bodies_are_answered_at_the_length_that_they_ask_for(server: Running, client: str) -> None:
    path, body = BODIES[client]
    with server.client.stream("POST", path, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]", lines
    chunks = [json.loads(line) for line in lines]
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    assert any(chunk["choices"] for chunk in chunks)


def test_what_they_ask_first_is_answered(server: Running) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/v1/models").json()["data"][0]["id"] == "bundled-transit"


def test_the_page_names_what_is_tested_here(server: Running) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"--endpoint (\S+)", text)) <= {path for path, _ in BODIES.values()}
    assert set(re.findall(r"model[= ]([\w-]+)", text)) >= {"bundled-transit"}
    for name in ("guidellm run", "vllm bench serve"):
        assert f"\n{name} " in text
