"""Which policies `--caches all` finds, on what they run and what they are compared with."""

import re
from pathlib import Path
from typing import Any

import pytest

from remask import LLM
from remask.errors import ConfigError
from remask.policies import names_for
from remask_lab.bench.contenders import COMPOSITIONS, RANDOM_ORDER, Contender, LeftOut, every_contender
from remask_lab.bench.workload import random_workload
from tests.plugins.conftest import example  # noqa: F401 - a fixture
from tests.sampling_fields import flat_params

SETTINGS: dict[str, dict[str, Any]] = {name: {"depth": 1} for name in ("bicache", *COMPOSITIONS)}


def found(
    model: str, settings: dict[str, dict[str, Any]] | None = None, **sampling: Any
) -> tuple[dict[str, Contender], list[LeftOut]]:
    llm = LLM(model, load_format="dummy", dtype="float32")
    params = flat_params(**{"max_tokens": 16, "ignore_eos": True, **sampling})
    workload = random_workload(llm, requests=2, sampling=params, prefix_tokens=8, prompt_tokens=4)
    rows, left_out = every_contender(llm, workload, SETTINGS | (settings or {}))
    assert rows[0].name == "none"
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}, left_out


def test_what_needs_an_order_runs_on_drawn_positions_beside_its_own_baseline() -> None:
    rows, left_out = found("llada-tiny")
    assert set(rows) == {*names_for("masked"), *COMPOSITIONS, RANDOM_ORDER}
    assert not left_out
    for name, row in rows.items():
        drawn = name in ("dkv-greedy", RANDOM_ORDER)
        assert row.baseline == (RANDOM_ORDER if drawn else "none")
        assert (row.workload is not None) is drawn
        assert row.settings.get("remasking") == ("random" if drawn else None)
        if row.workload is not None:
            assert {task.request.params.remasking.rule for task in row.workload.tasks} == {"random"}
    assert rows["dkv-greedy"].settings["window"] == 4


def test_where_positions_are_drawn_anyway_there_is_one_baseline() -> None:
    rows, left_out = found("llada-tiny", remasking="random")
    assert set(rows) == {*names_for("masked"), *COMPOSITIONS}
    assert {row.baseline for row in rows.values()} == {"none"}
    assert not left_out


@pytest.mark.parametrize(
    ("model", "sampling", "reason"),
    [
        ("dream-tiny", {}, "with remasking 'random': dkv-greedy is defined for models .* not Dream"),
        ("llada-tiny", {"threshold": 0.5}, "use remasking 'random' or 'order'; .*: no schedule says"),
    ],
)
def test_what_cannot_run_is_left_out_with_the_reason(model: str, sampling: dict[str, Any], reason: str) -> None:
    rows, (left,) = found(model, **sampling)
    assert set(rows) == {*names_for("masked"), *COMPOSITIONS} - {"dkv-greedy"}
    assert left.name == "dkv-greedy"
    assert re.search(reason, left.reason)


def test_settings_that_nobody_could_use_are_errors() -> None:
    with pytest.raises(ConfigError, match="ratio must be"):
        found("llada-tiny", {"dllm-cache": {"ratio": 5}})


@pytest.mark.thorough
def test_a_policy_of_another_package_is_one_of_all(example: Path) -> None:  # noqa: F811 - the fixture
    rows, _ = found("llada-tiny", {"late-rows": {"every": 3}})
    assert rows["late-rows"].settings == {"every": 3}
