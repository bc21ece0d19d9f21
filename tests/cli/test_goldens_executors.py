"""A sample of the golden runs of every kind under the ways to compute that are not the default ones here."""

from pathlib import Path

import pytest

from tests import goldens
from tests.cli import test_goldens, test_goldens_block_causal, test_goldens_uniform
from tests.cli.goldens import generate
from tests.engine.executors import NEEDS_TRITON
from tests.goldens import block_causal, moe, uniform

NUMPY = ("--attention", "numpy")
OPTIONS = pytest.mark.parametrize("options", [NUMPY, ("--graphs", "--overlap")], ids=["numpy", "graphs"])


@pytest.mark.few(3)
@OPTIONS
@pytest.mark.parametrize("model", goldens.MODELS)
def test_masked_models(tmp_path: Path, model: str, options: tuple[str, ...]) -> None:
    """One run of each policy and sampler."""
    runs = {(run["file"], run["method"]): run for run in test_goldens.RUNS[model]}
    lines = [goldens.request_line(run, goldens.run_id(run)) for run in runs.values()]
    answers = generate(tmp_path, goldens.model_dir(model), lines, *options)
    for run in runs.values():
        test_goldens.check(run, answers[goldens.run_id(run)], test_goldens.LAYERS[model])


@pytest.mark.few(3)
@OPTIONS
@pytest.mark.parametrize("model", uniform.MODELS)
def test_uniform_models(tmp_path: Path, model: str, options: tuple[str, ...]) -> None:
    test_goldens_uniform.ask(tmp_path, model, uniform.runs(model)[::5], *options)


@pytest.mark.few(3)
@OPTIONS
@pytest.mark.parametrize("model", block_causal.DECODED)
def test_block_causal_models(tmp_path: Path, model: str, options: tuple[str, ...]) -> None:
    test_goldens_block_causal.ask(tmp_path, model, block_causal.runs(model)[::9], "exact", *options)


def test_mixtures_of_experts(tmp_path: Path) -> None:
    test_goldens_block_causal.ask_masked(tmp_path, moe.masked_runs()[::19], *NUMPY)
    for model in moe.BLOCK_CAUSAL:
        test_goldens_block_causal.ask(tmp_path, model, moe.runs(model)[::19], "exact", *NUMPY)


@pytest.mark.thorough
@NEEDS_TRITON
@pytest.mark.parametrize(
    ("model", "file", "method", "options"),
    [
        ("llada", "llada_bicache_fast_dllm_dual", None, ()),
        ("llada_gqa", "llada_gqa_fast_dllm", "fast_dllm_dual_cache", ("--graphs",)),
    ],
    ids=["a shared prefix", "shared heads, in graphs"],
)
def test_a_run_in_the_interpreter(
    tmp_path: Path, model: str, file: str, method: str | None, options: tuple[str, ...]
) -> None:
    """The shortest of its kind."""
    runs = [run for run in test_goldens.RUNS[model] if run["file"] == file and method in (None, run["method"])]
    run = min(runs, key=lambda run: run["nfe"] * len(goldens.prompt_ids(run)))
    lines = [goldens.request_line(run, "0")]
    answers = generate(tmp_path, goldens.model_dir(model), lines, "--attention", "triton", *options)
    test_goldens.check(run, answers["0"], test_goldens.LAYERS[model])
