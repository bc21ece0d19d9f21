"""Other projects' clients against the server, each in a process of their own environment (`scripts/clients`)."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from remask.llm import LLM
from tests.answers.test_structured import ROBOT, matches
from tests.server.serving import TEMPLATE, Running, serving

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PET = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
         "required": ["kind", "lives"]},
        {"type": "object", "properties": {"kind": {"const": "dog"}, "barks": {"type": "boolean"}},
         "required": ["kind", "barks"]},
    ],
    "discriminator": {"propertyName": "kind"},
}  # fmt: skip
"""As pydantic writes a discriminated union."""
ASKED = {"system": "Orders: rope Anna; soap Ben.", "user": "Who ordered rope?"}

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs other projects' clients: scripts/clients"),
]


def told(running: Running, name: str, *more: str) -> dict[str, Any]:
    """What the script of that client prints."""
    command: list[str | Path] = [
        PYTHON,
        ROOT / "tests" / "clients" / f"with_{name}.py",
        running.base,
        "bundled-tariff",
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(running: Running) -> dict[str, Any]:
    found: dict[str, Any] = running.chat({"messages": turns_of()}).json()
    return found


def turns_of() -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in ASKED.items()]


def test_langchain(tariff: Running) -> None:
    found, own = told(tariff, "langchain", json.dumps(ROBOT)), answer(tariff)
    assert found["text"] == found["streamed"] == own["choices"][0]["message"]["content"]
    assert found["prompt_tokens"] == own["usage"]["prompt_tokens"]
    assert (found["top_logprobs"], found["tokens"]) == (2, [4, 4])
    matches({"json": ROBOT}, json.dumps(found["parsed"]))


def test_tools_of_langchain() -> None:
    """A forced call, whole and streamed; a free one that is not made is text."""
    llm = LLM("bundled-tariff", dtype="float32", device="cpu")
    assert llm.tokenizer is not None
    llm.tokenizer.use_chat_template(TEMPLATE)
    with serving(llm, model_names=["bundled-tariff"], sampling={}) as running:
        found = told(running, "langchain_tools", json.dumps(ROBOT))
    (call,) = found["calls"]
    assert call["name"] == "robot"
    assert set(call["args"]) == set(found["structured"]) == {"name", "on", "legs"}
    for other in ("streamed", "any"):
        assert [each["args"] for each in found[other]] == [call["args"]]
    assert isinstance(found["free"], str)


def test_litellm(tariff: Running) -> None:
    found, own = told(tariff, "litellm", json.dumps(ROBOT), json.dumps(PET)), answer(tariff)
    assert found["text"] == found["streamed"] == own["choices"][0]["message"]["content"]
    assert found["prompt_tokens"] == own["usage"]["prompt_tokens"]
    assert found["completion"] == 1
    matches({"json": ROBOT}, json.dumps(found["parsed"]))
    matches({"json": PET}, json.dumps(found["pet"]))
    turns = [*turns_of(), {"role": "assistant", "content": "Ann"}]
    continued = tariff.chat({"messages": turns, "add_generation_prompt": False, "continue_final_message": True})
    assert found["continued"] == found["messages"] == continued.json()["choices"][0]["message"]["content"]
    body = {"query": "rope", "documents": ["rope Anna", "soap Ben"]}
    results = tariff.client.post("/rerank", json=body).json()["results"]
    assert found["ranked"] == [[each["index"], pytest.approx(each["relevance_score"], abs=1e-4)] for each in results]


def test_instructor(tariff: Running) -> None:
    found = told(tariff, "instructor")
    robot = found["json_schema_mode"]
    assert set(robot) == {"name", "on", "legs"}, found
    assert 2 <= robot["legs"] <= 8
    # The JSON mode asks for any object, and checks it afterwards.
    assert set(found) == {"json_schema_mode", "json_mode", "union", "continued"}
    assert found["union"]["pet"].keys() in ({"kind", "lives"}, {"kind", "barks"})
    assert found["continued"] == {"pet": {"kind": "dog", "barks": True}}
    assert "validation error" in found["json_mode"] or set(found["json_mode"]) == set(robot)
