"""Other projects' clients against the server, each in a process of their own environment (`scripts/clients`).

They reach it directly, and through proxies with a prefix and TLS.
"""

import json
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.engine.config import EngineConfig
from remask.llm import LLM
from tests.answers.test_structured import ROBOT, matches
from tests.server.browser import opened
from tests.server.proxies import PREFIX, PROXIES, behind
from tests.server.serving import TEMPLATE, URL, Running, bundled, held, serving
from tests.server.test_paths import READ
from tests.waiting import LONGEST_S

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
DECIDING = PYTHON.parents[1] / "decisions" / "bin"
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


@pytest.fixture(scope="module")
def prefixed() -> Iterator[Running]:
    """A masked model whose tokenizer spells every text and whose template trims messages, under a prefix or none."""
    llm = bundled("tariff", "bicache")
    with serving(llm, model_names=["bundled-tariff"], sampling={}, root_path=PREFIX) as running:
        yield running


@pytest.fixture(scope="module", params=["directly", *PROXIES])
def tariff(
    request: pytest.FixtureRequest, prefixed: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """It as its clients reach it: directly, or behind a proxy whose certificate they trust."""
    if request.param == "directly":
        yield replace(prefixed, base=f"{prefixed.base}{PREFIX}")
        return
    folder = tmp_path_factory.mktemp(request.param)
    with behind(request.param, prefixed, folder) as base, pytest.MonkeyPatch.context() as patch:
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            patch.setenv(name, str(folder / "cert.pem"))
        verify = ssl.create_default_context(cafile=folder / "cert.pem")
        with httpx.Client(base_url=base, verify=verify, timeout=LONGEST_S) as client:
            yield replace(prefixed, base=base, client=client)


def told(running: Running, name: str, *more: str, python: Path = PYTHON) -> dict[str, Any]:
    """What the script of that client prints."""
    script = ROOT / "tests" / "clients" / f"with_{name}.py"
    command: list[str | Path] = [python, script, running.base, "bundled-tariff", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(running: Running) -> dict[str, Any]:
    return running.answer(URL, {"messages": turns_of()})


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
    llm = bundled("tariff", "auto", TEMPLATE)
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


def test_clients_that_ask_for_decisions(tariff: Running) -> None:
    found = told(tariff, "decisions", python=DECIDING / "python")
    own = found["openai"]
    assert own["types"] == ["Predicate", "Choice", "Score"]
    assert own["names"] == ["p", None, "s"]
    assert own["values"] == ["'true'", "True"]
    assert own["same"]
    assert own["usage"]
    assert own["many"] == 400
    assert own["failed"] == {"questions": [400, "questions"], "input": [400, "input"], "model": [404, "model"]}
    told_by_sdk = found["typesafe"]
    assert 0 < told_by_sdk["noul"] < 1
    assert told_by_sdk["legend"] == {"0": "bad", "1": {"is": "good"}}
    assert (told_by_sdk["model"], told_by_sdk["models"]) == ("bundled-tariff", ["bundled-tariff", "jev-latest"])
    assert "does not exist" in told_by_sdk["unknown"]
    assert found["langchain"]["c"] in ("Anna", "Ben")
    for order in found["pydantic_ai"].values():
        assert order.keys() == {"soap", "who"}


def test_paths_and_streams_pass(tariff: Running) -> None:
    """HEAD, both spellings, no address that leaves the prefix, and the first step before the second one is done."""
    inside = tariff.base.startswith("http:")
    for path in (*READ, "/live", "/ready"):
        for method, spelling in (("GET", path), ("HEAD", path), ("GET", f"{path}/".replace("//", "/"))):
            answer = tariff.client.request(method, f"{tariff.base}{spelling}")
            right = 200 if inside or path != "/metrics" else 403
            assert (answer.status_code, answer.history) == (right, []), spelling
    bare = tariff.client.get(tariff.base)
    assert bare.is_redirect
    assert bare.headers["Location"].removeprefix(tariff.base.removesuffix(PREFIX)) == f"{PREFIX}/"
    servers = tariff.client.get(f"{tariff.base}/openapi.json").json()["servers"]
    assert servers == [{"url": PREFIX}]
    body = {"messages": turns_of(), "stream": True, "block_length": 1, "max_tokens": 8, "steps": 8}
    with held(tariff, 2) as hold, tariff.client.stream("POST", f"{tariff.base}{URL}", json=body) as answer:
        lines = answer.iter_lines()
        assert "chat.completion.chunk" in next(lines)
        hold.let(-1)
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_pages_in_a_browser(tariff: Running, browser: Any) -> None:
    """Each under both spellings of its address; the chat answers, and the reference is read."""
    with opened(browser, tariff.base, ignore_https_errors=True) as tab:
        tab.say(ASKED["user"])
        for page in ("docs", "docs/"):
            tab.page.goto(f"{tariff.base}/{page}")
            tab.shown("#endpoints details")
        assert tab.said == []


def test_official_clients_in_process(tariff: Running) -> None:
    """OpenAI's and Anthropic's, whole and streamed."""
    text = answer(tariff)["choices"][0]["message"]["content"]
    with tariff.openai() as client:
        made = client.chat.completions.create(model="bundled-tariff", messages=turns_of())  # type: ignore[arg-type]
        parts = client.responses.create(
            model="bundled-tariff", instructions=ASKED["system"], input=ASKED["user"], stream=True
        )
        streamed = "".join(each.delta for each in parts if each.type == "response.output_text.delta")
        assert made.choices[0].message.content == streamed == text
        assert client.models.retrieve("bundled-tariff").id == "bundled-tariff"
    turns: Any = [{"role": "user", "content": ASKED["user"]}]
    with tariff.anthropic() as other:
        fields: Any = {"model": "bundled-tariff", "system": ASKED["system"], "messages": turns, "max_tokens": 64}
        assert other.messages.count_tokens(model="bundled-tariff", messages=turns).input_tokens
        with other.messages.stream(**fields) as events:
            assert events.get_final_text()


@pytest.mark.parametrize("key", [None, "s3cret"])
def test_system_ones_conformance_suite(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that must be so, and all that should: with the tokenizer and the template of `smollm2`, and few weights.

    The bundled models are too short for its question of 255 options, which takes 4,600 tokens.
    """
    found = find_model(ModelSettings("smollm2"))
    config = replace(found.config, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=160)
    small = replace(found, config=config, folder=None, adapter=None)
    monkeypatch.setattr("remask.llm.find_model", lambda _: small)
    llm = LLM("smollm2", dtype="float32", device="cpu", engine=EngineConfig(max_model_len=8192))
    with serving(llm, model_names=["smollm2"], api_keys=[key] if key else []) as running:
        command: list[str | Path] = [DECIDING / "jevcompat", "test", running.base, *(["--key", key] if key else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "\nconformant" in done.stdout, done.stdout[-3000:]
    assert "\u2717" not in done.stdout
