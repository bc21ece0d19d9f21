"""Answers depend on the question and on what it is about, and on nothing else; and hostile bodies end in sentences."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remask.engine.config import EngineConfig
from remask.llm import LLM
from tests.server.serving import Running, make_llm, serving

pytestmark = pytest.mark.thorough

WORDS = ["rope", "soap", "lamp", "Anna", "Ben", "Carl", "saw", "mat", "7", "yes", "now", "no"]


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def question(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["noul", "choice", "choice", "score", "number"])
    asked: dict[str, Any] = {"type": kind, "instructions": f"{words(rng, 6)}?"}
    if kind == "choice":
        names = rng.sample(WORDS, rng.randint(2, 5))
        asked |= {"criteria": {name: rng.choice([None, words(rng, 3)]) for name in names}}
        asked |= rng.choice([{}, {"labels": "letters"}, {"template": "It is {answer}"}])
    elif kind == "score":
        asked["criteria"] = [words(rng, 3) for _ in range(rng.randint(2, 6))]
    elif kind == "number":
        asked |= {"min": rng.randint(0, 9), "max": rng.randint(10, 14)}
    return asked


def numbers(answer: dict[str, Any]) -> list[float]:
    return [answer["noul"]] if "noul" in answer else list(answer["probabilities"].values())


@pytest.fixture(scope="module")
def even() -> Iterator[Running]:
    """One kernel whatever the batch, so that what is left is what the questions do."""
    engine = EngineConfig(max_num_seqs=16, batch_invariant=True)
    llm = LLM("bundled-tariff", cache="none", dtype="float32", device="cpu", engine=engine)
    with serving(llm, model_names=["bundled-tariff"], sampling={}) as running:
        yield running


def test_answers_depend_on_nothing_else(even: Running) -> None:
    """300 bodies against each question alone: not on order, number or names of questions."""
    rng = random.Random(59)
    for number in range(300):
        asked = [question(rng) for _ in range(rng.randint(2, 5))]
        names = [f"{words(rng, 2)} {n} {rng.choice(['', '.', 'é', '🎯'])}" for n in range(len(asked))]
        state = rng.choice([words(rng, 12), {"a": words(rng, 6)}, [words(rng, 3)]])
        body = {"state": state, "questions": dict(zip(names, asked, strict=True)), "calibrate": rng.random() < 0.2}
        told = even.client.post("/v1/systemone", json=body)
        assert told.status_code == 200, (number, told.text)
        name, picked = rng.choice([*zip(names, asked, strict=True)])
        one = even.client.post("/v1/systemone", json={**body, "questions": {"q": picked}}).json()["answers"]["q"]
        assert numbers(told.json()["answers"][name]) == pytest.approx(numbers(one), abs=1e-5), (number, name)
    assert torch.get_default_dtype() == torch.float32


def hostile(rng: random.Random) -> tuple[str, Any]:
    """A body that is wrong in one way: deep, huge, of wrong types, or against a rule."""
    deep: Any = 1
    for _ in range(rng.choice([40, 120])):
        deep = rng.choice([[deep], {"a": deep}])
    asked: dict[str, Any] = {"type": "predicate", "instructions": "is it ?", "name": "a"}
    junk = rng.choice([None, 1, -1.5, True, "", [], {}, [[]], {"a": 1}, "x" * 10_000, deep, [1] * 3000, "\ud800"])
    openai: dict[str, Any] = {"input": "oak", "questions": [asked]}
    system: dict[str, Any] = {"state": "oak", "questions": {"q": {"type": "noul", "instructions": "is it ?"}}}
    item = {"role": "user", "content": [{"type": "input_json", "data": rng.choice([deep, junk])}]}
    call = {"type": rng.choice(["function_call", "custom_tool_call_output", "x"]), "call_id": junk, "name": junk}
    options = [{"value": f"{n}{'y' * 1000}"} for n in range(255)]
    wrong: list[tuple[str, Any]] = [
        ("/v1/decisions", {**openai, rng.choice(["input", "questions", "prompt_cache_options", "cache_salt"]): junk}),
        ("/v1/decisions", {**openai, "questions": [{**asked, rng.choice([*asked, "choices", "labels"]): junk}]}),
        ("/v1/decisions", {**openai, "questions": [asked] * rng.randint(2, 3000)}),
        ("/v1/decisions", {**openai, "input": [item, call, junk]}),
        ("/v1/decisions", {**openai, "questions": [{**asked, "type": "choice", "choices": options}]}),
        ("/v1/decisions", {**openai, "questions": [{**asked, "type": "score", "levels": [{"label": junk}] * 2}]}),
        ("/v1/systemone", {**system, rng.choice(["state", "questions", "assets", "model"]): junk}),
        ("/v1/systemone", {**system, "questions": {"q": {"type": "choice", "criteria": junk, "instructions": junk}}}),
        ("/v1/systemone", {**system, "questions": {"q": {"type": "choice", "criteria": dict.fromkeys("abc", junk)}}}),
        ("/v1/systemone", {**system, "questions": {str(n): junk for n in range(rng.choice([1, 9000]))}}),
        ("/v1/systemone", {**system, "state": [deep], "questions": {"q": {"type": "noul", "instructions": deep}}}),
    ]
    return rng.choice(wrong)


def test_hostile_bodies_end_in_sentences_and_nobody_waits() -> None:
    rng = random.Random(59)
    with serving(make_llm()) as server:
        refused = 0
        for number in range(500):
            path, body = hostile(rng)
            content = json.dumps(body)
            told = server.client.post(path, content=content, headers={"Content-Type": "application/json"})
            assert told.status_code in (200, 400, 404, 413, 422), (number, content[:300], told.text[:500])
            refused += told.status_code != 200
            if told.status_code != 200:
                said = json.dumps(told.json())
                assert 20 < len(said) < 2000, (number, said[:300])
            assert not server.open, number
        assert refused > 400
        assert server.ask().status_code == 200
        server.settle()
