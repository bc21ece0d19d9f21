"""What is told of plain reuse."""

from typing import Any

import pytest

from remask.core.sampling import SamplingParams
from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask_lab.bench.workload import TRANSIT_SAMPLING, bundled_workload, random_workload
from remask_lab.subjects.collapse import measure_collapse
from remask_lab.subjects.collapse_report import reading, shares


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=2))


def test_the_bundled_task_is_judged_by_part(llm: LLM) -> None:
    params = SamplingParams.from_mapping(TRANSIT_SAMPLING)
    none, reuse, bicache = measure_collapse(llm, bundled_workload(llm, 2, 1, 0, params), {"depth": 2}, 1)
    assert [row["cache"] for row in (none, reuse, bicache)] == ["none", "reuse", "bicache"]
    assert shares(none) == {"accuracy": 1, "rules": 1, "format": 1, "agreement": 1}
    assert (reuse["prefix_depth"], bicache["prefix_depth"]) == (llm.loaded.config.layers, 2)


def test_a_response_that_is_cut_keeps_neither_part(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, steps=2)
    none, *_ = measure_collapse(llm, bundled_workload(llm, 2, 1, 0, params), {"depth": 2}, 1)
    assert shares(none) == {"accuracy": 0, "rules": 0, "format": 0, "agreement": 1}


def test_random_tokens_have_agreement_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    rows = measure_collapse(llm, random_workload(llm, 2, 1, 0, params, 20, 4), {"depth": 2}, 1)
    assert [set(shares(row)) for row in rows] == [{"agreement"}] * 3
    assert reading(rows).count("of its tokens are those of no cache") == 2


def row(accuracy: float, rules: float, form: float) -> dict[str, Any]:
    return {
        "cache": "reuse",
        "ratio_to_none": 2.0,
        "accuracy": accuracy,
        "accuracy_interval": [accuracy - 0.1, accuracy + 0.1],
        "parts": {"rules": rules, "format": form},
        "agreement_with_none": 0.5,
    }


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ((0.9, 1.0, 0.9), "no accuracy is lost"),
        ((0.75, 0.8, 0.9), "a loss within the 95 % interval of no cache"),
        ((0.6, 0.8, 0.9), "a loss of 20.0 points, beyond"),
        ((0.1, 0.8, 0.2), "accuracy collapses, and of the two parts of the system prompt the format suffers most"),
        ((0.1, 0.1, 0.8), "accuracy collapses, and of the two parts of the system prompt the rules suffer most"),
    ],
)
def test_the_reading_weighs_the_loss(after: tuple[float, float, float], said: str) -> None:
    text = reading([row(0.8, 0.9, 0.9), row(*after)])
    assert said in text
    assert text.startswith("reuse runs at 2.00 times the speed of no cache; accuracy goes from 80.0 %")


def test_answers_without_parts_have_accuracy_alone() -> None:
    whole = {**row(0.8, 0.9, 0.9), "parts": {}}
    assert reading([whole, {**row(0.1, 0.9, 0.9), "parts": {}}]).endswith("80.0 % to 10.0 %: accuracy collapses.")
