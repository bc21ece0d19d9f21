"""What the laboratory measures of this package's caches and rule."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.tests.bench.test_contenders import found
from lab.tests.bench.test_reference import opened, references
from lab.tests.ops import test_flops as flops
from lab.tests.ops import test_operations as operations

from remask import LLM
from remask_lab.bench.reference import loss_differences, mean_loss, measure_losses
from tests.engine.support import MODELS, Work, poisoned_engine, request

SETTINGS: dict[str, dict[str, Any]] = {
    "elastic-cache": {"window": 4, "threshold": 0.97},
    "dllm-cache": {"prompt_interval": 5, "response_interval": 3, "ratio": 0.4},
    "bicache": {"depth": 2, "refresh_interval": 3},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("elastic-cache", {"window": 4, "threshold": 0.97}),
    ("elastic-cache", {"window": 8, "threshold": 1.0}),
    ("elastic-cache", {"window": 3, "threshold": 0.0}),
    ("entropy-cache", {}),
    ("acache", {}),
    ("acache+block-dual", {"ratio": 0.4}),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("sampling", [{"block_length": 4}, {"cfg_scale": 1.5}], ids=["blocks", "guided"])
@pytest.mark.parametrize("family", ["llada", "dream", "llada-moe"])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_flops_are_those_counted(family: str, sampling: dict[str, Any], name: str, settings: dict[str, Any]) -> None:
    flops.test_masked_models(family, sampling, name, settings)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["none", "dllm-cache", "elastic-cache", "bicache"])
def test_tails_that_are_left_out(name: str) -> None:
    knobs = {"min_confidence": 0.17, "window": 1, "threshold": 1.0, "cut_tail": True}
    asked = request("r", 13, 6, max_tokens=16, remasking="slowfast", config=knobs)
    item = Work(asked, flops.policy(name, SETTINGS.get(name, {})))
    executed = flops.measured(poisoned_engine(MODELS["llada"]), [item])
    cost = executed.meter.total
    assert cost.total.flops + cost.repeated == executed.flops


def test_watching_has_its_part_of_the_time() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32", engine=operations.LIMITS)
    operations.test_parts_add_up_and_flops_are_those_counted(llm, "elastic-cache", {"window": 4}, {"watch"})


def test_under_the_rule_no_positions_can_be_drawn_instead() -> None:
    rows, left_out = found("llada-tiny", remasking="slowfast")
    assert {left.name for left in left_out} == {"dkv-greedy"}
    assert "no schedule says" in left_out[0].reason
    assert {"elastic-cache", "entropy-cache", "acache"} <= set(rows)


def test_tokens_that_a_window_had_not_predicted_do_not_count(tmp_path: Path) -> None:
    llm = opened("llada", tmp_path)
    known = [references(llm, steps=2)[2]]
    read, reason = measure_losses(llm, known, llm.session.policy("elastic-cache", {"window": 2}), 0)
    assert reason is None
    none = measure_losses(llm, known, llm.session.policy("none"), 0)[0]
    missing = sum(int(np.isnan(each.nats).sum()) for each in read.values())
    assert missing > 0
    assert mean_loss(read)["loss_tokens"] == mean_loss(none)["loss_tokens"] - missing
    compared = loss_differences(read, none, dict.fromkeys(read, 0))
    assert np.isfinite(compared["loss_over_none"])
    assert 0 <= compared["pass_agreement"] <= 1
