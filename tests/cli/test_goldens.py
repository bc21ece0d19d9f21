"""The golden runs through `remask generate`: token ids, order of transfers, forwards and row-layers."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from remask.policies import policy_names
from tests import goldens
from tests.cli.goldens import TIE, check_trace, generate

SUPPORTED = [
    run
    for file in goldens.run_files()
    for run in goldens.runs(file)
    if run["method"] != "fast_dllm_dual_without_bicache_engine"
    and set(goldens.request_line(run, "0")["cache"].split("+")) <= set(policy_names())
]


def check(run: dict[str, Any], answer: dict[str, Any], layers: int) -> None:
    """Everything that binds for one golden run."""
    exempt = goldens.exempt(run)
    if "tokens" not in exempt:
        assert answer["token_ids"] == run["output_ids"]
        check_trace(run, answer)
    forwards = goldens.expected_forwards(run)
    if forwards is not None:
        assert answer["usage"]["forwards"] == forwards
    if "row_layers" not in exempt:
        assert answer["usage"]["row_layers"] == goldens.row_layers(run, layers)


LAYERS = {"llada": 6, "llada_gqa": 4, "dream": 6, "dream_dllm": 4}


RUNS = {model: [run for run in SUPPORTED if run["model"] == model] for model in goldens.MODELS}
CALLS = 4  # in which all runs of a model are asked for, so that several processes can share them
SAMPLE = 5  # runs of each method of a model


def ask_for(tmp_path: Path, model: str, runs: Iterable[dict[str, Any]]) -> None:
    """Lines of all policies stand in one file, so they run batched together."""
    named = {goldens.run_id(run): run for run in runs}
    lines = (goldens.request_line(run, name) for name, run in named.items())
    answers = generate(tmp_path, goldens.model_dir(model), lines)
    assert set(answers) == set(named)
    for name, run in named.items():
        check(run, answers[name], LAYERS[model])


@pytest.mark.parametrize("model", goldens.MODELS)
def test_golden_runs_of_every_method(tmp_path: Path, model: str) -> None:
    of_method: dict[str, list[dict[str, Any]]] = {}
    for run in RUNS[model]:
        of_method.setdefault(run["method"], []).append(run)
    ask_for(tmp_path, model, (run for runs in of_method.values() for run in runs[:: -(-len(runs) // SAMPLE)]))


@pytest.mark.thorough
@pytest.mark.parametrize("model", goldens.MODELS)
@pytest.mark.parametrize("call", range(CALLS))
def test_all_golden_runs_of_a_model(tmp_path: Path, model: str, call: int) -> None:
    ask_for(tmp_path, model, RUNS[model][call::CALLS])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [["--max-row-layers", "300", "--page-size", "5"], ["--max-num-seqs", "1"], ["--overlap", "--max-num-seqs", "4"]],
)
def test_the_answer_does_not_depend_on_the_batch(tmp_path: Path, options: list[str]) -> None:
    """A few at a time under a tight budget and odd pages, one at a time, or with passes queued ahead."""
    runs = {goldens.run_id(run): run for run in RUNS["llada"]}
    names = sorted(runs)[::31]
    lines = (goldens.request_line(runs[name], name) for name in names)
    answers = generate(tmp_path, goldens.model_dir("llada"), lines, *options)
    for name in names:
        check(runs[name], answers[name], LAYERS["llada"])


@pytest.mark.parametrize(
    ("device", "gap", "order_binds"),
    [("cpu", 1e-5, True), ("cuda", 1e-5, False), ("cuda", 2 * TIE, True), ("cuda", None, True)],
)
def test_positions_change_places_only_at_a_tie(
    device: str, gap: float | None, order_binds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cli.goldens.device", lambda: device)
    transfers = [{"fwd": 1, "pos": [8], "tok": [3]}, {"fwd": 2, "pos": [7], "tok": [4]}]
    trace = [{"positions": each["pos"], "token_ids": each["tok"]} for each in transfers]
    run = {"transfers": transfers, "min_conf_gap": gap}
    check_trace(run, {"trace": trace})
    with pytest.raises(AssertionError) if order_binds else nullcontext():
        check_trace(run, {"trace": trace[::-1]})
    with pytest.raises(AssertionError):
        check_trace(run, {"trace": [trace[0], trace[1] | {"token_ids": [5]}]})
