"""Bodies made of the declared fields reach the engine, and whatever comes is answered without harm."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from remask.checks import ModelKind
from remask.llm import LLM
from tests.server.bodies import LENGTH, bodies
from tests.server.serving import Running, make_llm, serving
from tests.server.test_kinds_served import sdar

COMPLETIONS = "/v1/completions"
EXAMPLES = 25  # for each kind of model
SHARE = 0.6  # of the bodies that the declarations allow, so many run

POLICIES: dict[ModelKind, tuple[str, ...]] = {
    "masked": ("none", "bicache", "block-prefix", "block-dual", "dllm-cache", "bicache+block-dual"),
    "uniform": ("none", "uniform-cache"),
    "block_causal": ("none", "exact"),
}


def _uniform(_: Path) -> LLM:
    return LLM("bundled-uniform", cache="auto", dtype="float32", device="cpu")


MODELS: dict[ModelKind, Callable[[Path], LLM]] = {
    "masked": lambda _: make_llm(),
    "uniform": _uniform,
    "block_causal": lambda folder: sdar(folder / "model"),
}


@pytest.fixture(scope="module", params=list(MODELS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelKind, Running]]:
    """A server for every kind of model, with short answers."""
    kind: ModelKind = request.param
    with serving(MODELS[kind](tmp_path_factory.mktemp("fuzz")), sampling={"max_tokens": 16}) as running:
        yield kind, running


@dataclass
class Outcomes:
    statuses: Counter[int] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # messages of the 400s

    @property
    def share(self) -> float:
        """Of all bodies, those that ran and were answered."""
        return self.statuses[200] / self.statuses.total()


def send_at_random(kind: ModelKind, running: Running, examples: int, *, usual: bool) -> Outcomes:
    """So many bodies, each of which must be answered, and none with a failure of the server."""
    outcomes = Outcomes()
    vocab = running.service.llm.loaded.config.vocab

    @settings(max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(body=bodies(kind, POLICIES[kind], vocab, usual))
    def send(body: dict[str, Any]) -> None:
        response = running.client.post(COMPLETIONS, json=body)
        allowed = {200, 400, 504} if "deadline_s" in body else {200, 400}
        assert response.status_code in allowed, response.text
        if body.get("stream") and response.status_code == 200:
            assert response.text.endswith("data: [DONE]\n\n")
            late = '"code":"deadline_exceeded"' in response.text
            assert '"error"' not in response.text or late, response.text
        outcomes.statuses[response.status_code] += 1
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["message"]
            outcomes.refused[error["message"]] += 1

    send()
    running.settle()
    return outcomes


SIZES = [pytest.param(1, marks=pytest.mark.few(4)), pytest.param(32, marks=pytest.mark.soak)]


@pytest.mark.thorough
@pytest.mark.parametrize("times", SIZES)
def test_most_allowed_bodies_run(served: tuple[ModelKind, Running], times: int) -> None:
    kind, running = served
    outcomes = send_at_random(kind, running, times * EXAMPLES, usual=True)
    print(f"fuzz: {kind}: {outcomes.share:.0%} of {outcomes.statuses.total()} ran")
    assert outcomes.share >= SHARE, (outcomes.statuses, outcomes.refused.most_common(8))
    assert running.client.get("/health").status_code == 200


@pytest.mark.parametrize("times", SIZES)
def test_nothing_that_is_allowed_does_harm(served: tuple[ModelKind, Running], times: int) -> None:
    """Values from all over their ranges: the largest numbers of steps, the longest texts, the widest lists."""
    kind, running = served
    outcomes = send_at_random(kind, running, times * EXAMPLES // 2, usual=False)
    print(f"fuzz: {kind}, all values: {outcomes.share:.0%} of {outcomes.statuses.total()} ran")
    assert running.client.get("/health").status_code == 200
    assert running.client.post(COMPLETIONS, json={"prompt": "from ivy", "max_tokens": LENGTH}).status_code == 200
