"""Random requests under this package's caches and rule, in mixed batches with remask's own, against dense decoders."""

import random

import pytest

from caches.tests.oracles import DREAM, LLADA
from tests.engine import test_against_oracles as core
from tests.engine import test_growing_against_oracles as growing
from tests.engine import test_infill_against_oracles as infill
from tests.engine.support import poisoned_engine, run
from tests.engine.test_against_oracles import SEEDS, Kind, check, compare, drawn, limits, model_of, work_of
from tests.goldens import moe


def beside(kinds: dict[str, Kind], others: dict[str, Kind], seed: object) -> dict[str, Kind]:
    """The kinds of requests of this package, and a few of remask's own in the same batch."""
    names = random.Random(f"beside {seed}").sample(list(others), 4)
    return {**kinds, **{f"{name.split(',')[0]}, beside {number}": others[name] for number, name in enumerate(names)}}


@pytest.mark.few(11)
@SEEDS
@pytest.mark.parametrize("model", ["llada", "llada_gqa"])
def test_llada(model: str, seed: int) -> None:
    check(model, seed, beside(LLADA, core.LLADA, seed))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", [moe.MASKED, "illada", "modernbert"])
def test_other_shapes(model: str, seed: int) -> None:
    """Mixtures of experts, tied embeddings, windows."""
    check(model, seed, beside(LLADA, core.LLADA, seed))


@pytest.mark.thorough
@SEEDS
@pytest.mark.parametrize("model", ["dream", "dream_dllm"])
def test_dream(model: str, seed: int) -> None:
    check(model, seed, beside(DREAM, core.DREAM, seed))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["illada", "llada_gqa", "dream"])
def test_growing_canvases(model: str, seed: int) -> None:
    """A growing request of each kind in one batch with some whose canvas has its whole length."""
    rng, kinds = random.Random(f"growing {model} {seed}"), DREAM if model == "dream" else LLADA
    found = {name: growing.drawn_growing(rng, model, name, kind) for name, kind in kinds.items()}
    fixed = {f"fixed {name}": drawn(rng, model, name, kinds[name]) for name in rng.sample(list(kinds), 4)}
    work = [work_of(line, name, rng.randrange(10)) for name, (line, _) in {**found, **fixed}.items()]
    rng.shuffle(work)
    results = run(poisoned_engine(model_of(model), **limits(rng)), work)
    shift = model_of(model).config.shift
    for name, (line, stages) in found.items():
        growing.check(line, stages, results[name], shift)
    for name, (line, expected) in fixed.items():
        compare(line, expected, results[name], shift)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
@pytest.mark.parametrize("model", ["llada", "llada_gqa", "dream", "dream_dllm"])
def test_canvases_with_holes(model: str, seed: int) -> None:
    infill.check(model, seed, DREAM if model.startswith("dream") else LLADA)
