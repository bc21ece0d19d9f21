"""Golden runs of every kind of model through `remask generate --tensor-parallel N`, in real processes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import goldens
from tests.cli import test_goldens, test_goldens_block_causal, test_goldens_uniform
from tests.cli.goldens import generate
from tests.engine import test_whole_canvas
from tests.families import test_diffusion_gemma
from tests.goldens import llada22, moe, nemotron, sumi, uniform

pytestmark = pytest.mark.usefixtures("ranks")
SIZES = (2, 4)


@dataclass(frozen=True)
class Sample:
    """Runs of one golden model, and how they are asked for and checked."""

    runs: list[Any]
    ask: Callable[..., object]

    def check(self, tmp_path: Path, size: int, count: int | None) -> None:
        """Ask for `count` of the runs, spread over all of them; None: for all."""
        step = 1 if count is None else max(1, len(self.runs) // count)
        self.ask(tmp_path, self.runs[step // 2 :: step], "--tensor-parallel", str(size), "--threads", "1")


def masked(model: str) -> Sample:
    def ask(tmp_path: Path, runs: list[dict[str, Any]], *options: str) -> None:
        named = {goldens.run_id(run): run for run in runs}
        lines = (goldens.request_line(run, name) for name, run in named.items())
        answers = generate(tmp_path, goldens.model_dir(model), lines, *options)
        for name, run in named.items():
            test_goldens.check(run, answers[name], test_goldens.LAYERS[model])

    return Sample(test_goldens.RUNS[model], ask)


def causal(model: str) -> Sample:
    return Sample(
        test_goldens_block_causal.GOLDENS[model].runs(model),
        lambda tmp_path, runs, *options: test_goldens_block_causal.ask(tmp_path, model, runs, "exact", *options),
    )


def noisy(model: str) -> Sample:
    return Sample(
        uniform.runs(model),
        lambda tmp_path, runs, *options: test_goldens_uniform.ask(tmp_path, model, runs, *options),
    )


def modes(model: str) -> Sample:
    """All modes in one batch, drafts under the adapter in the model's folder among them."""

    def ask(tmp_path: Path, runs: list[dict[str, Any]], *options: str) -> None:
        named = {str(number): run for number, run in enumerate(runs)}
        lines = (
            {"id": name, "prompt_token_ids": run["prompt"], "sampling": nemotron.sampling(run), "cache": "exact"}
            for name, run in named.items()
        )
        answers = generate(tmp_path, nemotron.folder(model), lines, *options, max_model_len=128)
        for name, run in named.items():
            assert answers[name]["token_ids"] == run["tokens"], run["mode"]

    return Sample(nemotron.runs(model), ask)


def canvases(shape: str) -> Sample:
    """By transformers, as nothing is recorded of it."""
    own = test_diffusion_gemma.made(shape, 0.03)

    def ask(tmp_path: Path, runs: list[Any], *options: str) -> None:
        named = {str(number): run for number, run in enumerate(runs)}
        lines = (
            {"id": name, "prompt_token_ids": prompt, "sampling": sampling, "cache": "exact"}
            for name, (prompt, sampling) in named.items()
        )
        answers = generate(tmp_path, own.folder, lines, *options, max_model_len=128)
        for name, run in named.items():
            found = answers[name]["token_ids"], answers[name]["usage"]["forwards"]
            assert found == test_diffusion_gemma.decoded(own, *run), name

    return Sample(test_diffusion_gemma.requests(own, shape), ask)


def indels(model: str) -> Sample:
    """Blocks whose places move: every rank sees the same logits, and one of them says what is written."""

    def ask(tmp_path: Path, runs: list[dict[str, Any]], *options: str) -> None:
        lines = (
            {"id": str(number), "prompt_token_ids": run["prompt"], "sampling": llada22.sampling(run), "cache": "exact"}
            for number, run in enumerate(runs)
        )
        answers = generate(tmp_path, llada22.folder(model), lines, *options, "--max-steps", "4000")
        for number, run in enumerate(runs):
            answer = answers[str(number)]
            assert (answer["token_ids"], answer["usage"]["steps"]) == (run["tokens"], run["passes"])

    return Sample(llada22.runs(model), ask)


def whole_canvases(model: str) -> Sample:
    """As in one process, drawn tokens too, and as recorded where nothing is drawn."""

    def ask(tmp_path: Path, runs: list[dict[str, Any]], *options: str) -> None:
        lines = [
            {
                "id": str(number),
                "prompt_token_ids": run["prompt"],
                "sampling": test_whole_canvas.sampling(run, run["noise"], number),
            }
            for number, run in enumerate(runs)
        ]
        one, answers = (
            generate(tmp_path, sumi.folder(model), lines, *more, max_model_len=128) for more in ((), options)
        )
        for number, run in enumerate(runs):
            found = answers[str(number)]["token_ids"]
            assert found == one[str(number)]["token_ids"]
            drawn = run["sampler"] == "ancestral" or (run["sampler"] == "adaptive" and run["temperature"] > 0)
            assert drawn or found == run["tokens"]

    return Sample(sumi.runs(model), ask)


# Without the models whose 3 and 7 heads no such number of ranks can share.
SAMPLES: dict[str, Callable[[], Sample]] = {
    "llada": lambda: masked("llada"),
    "llada_gqa": lambda: masked("llada_gqa"),
    "dream": lambda: masked("dream"),
    "llada_moe": lambda: Sample(moe.masked_runs(), test_goldens_block_causal.ask_masked),
    "llada2": lambda: causal("llada2_flash"),
    "sdar_moe": lambda: causal("sdar_moe_b8"),
    "sdar_b4": lambda: causal("sdar_b4"),
    "sdar_b8": lambda: causal("sdar_b8"),
    "nemotron": lambda: modes("plain"),
    "nemotron, peaky": lambda: modes("peaky"),
    "gidd": lambda: noisy("unif"),
    "gidd, gentle": lambda: noisy("gentle"),
    "gidd, hybrid": lambda: noisy("hybrid"),
    "diffusion-gemma": lambda: canvases("as many heads of K/V"),
    "llada2.2": lambda: indels("calm"),
    "sumi": lambda: whole_canvases("plain"),
}
FEW = {
    "llada": 12,
    "dream": 4,
    "llada_moe": 4,
    "llada2": 5,
    "sdar_b4": 4,
    "nemotron, peaky": 12,
    "gidd": 3,
    "diffusion-gemma": 4,
    "llada2.2": 6,
    "sumi": 8,
}


@pytest.mark.few(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FEW)
def test_a_sample_of_the_golden_runs(tmp_path: Path, name: str, size: int) -> None:
    SAMPLES[name]().check(tmp_path, size, FEW[name])


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SAMPLES)
def test_all_golden_runs(tmp_path: Path, name: str, size: int) -> None:
    SAMPLES[name]().check(tmp_path, size, None)
