"""The golden runs of A2D, ModernBERT and Stable-DiffCoder through `remask generate`: tokens, and each step's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.goldens import generate
from tests.goldens import a2d as goldens

CASES = [
    pytest.param(model, asked, cache, id=f"{model}-{asked[0]}{'-shifted' * asked[1]}-{cache}")
    for model in goldens.MODELS
    for asked in goldens.runs(model)
    for cache in (["none"] if asked[0] == "mdlm" else ["none", "exact"])
]


def ask(
    tmp_path: Path, model: str, asked: goldens.Asked, runs: Mapping[str, goldens.Run], cache: str, *options: str
) -> None:
    lines = (goldens.request_line(name, run, cache) for name, run in runs.items())
    laid = ["--hf-overrides", json.dumps(goldens.overrides(asked))]
    answers: dict[str, dict[str, Any]] = generate(
        tmp_path, goldens.model_dir(model), lines, *laid, *options, max_model_len=256
    )
    for name, run in runs.items():
        answer = answers[name]
        assert answer.get("error") is None, name
        assert answer["token_ids"] == run["tokens"], name
        assert goldens.trace(run, answer) == run["trace"], name
        if cache == "none" and "passes" in run:
            assert answer["usage"]["forwards"] == run["passes"], "no pass is spent on an idle step"


@pytest.mark.few(5)
@pytest.mark.parametrize(("model", "asked", "cache"), CASES)
def test_all_golden_runs_that_one_model_can_answer_in_one_call(
    tmp_path: Path, model: str, asked: goldens.Asked, cache: str
) -> None:
    ask(tmp_path, model, asked, goldens.runs(model)[asked], cache)


@pytest.mark.few(11)
@pytest.mark.parametrize(
    "options",
    [
        ["--max-num-seqs", "1"],
        ["--max-row-layers", "250", "--max-num-seqs", "5", "--page-size", "16"],
        ["--attention", "numpy"],
        ["--graphs", "--overlap"],
    ],
    ids=["alone", "few rows a step", "numpy", "graphs and overlap"],
)
@pytest.mark.parametrize(("model", "asked", "cache"), CASES)
def test_the_answer_does_not_depend_on_the_batch_or_on_what_computes(
    tmp_path: Path, model: str, asked: goldens.Asked, cache: str, options: list[str]
) -> None:
    runs = dict(list(goldens.runs(model)[asked].items())[:: 1 if "--max-num-seqs" in options else 3])
    ask(tmp_path, model, asked, runs, cache, *options)
