"""Long random runs of one engine, and every golden run by itself. Too long for every run: `scripts/soak`."""

import random
from pathlib import Path
from typing import Any

import pytest

from remask.request.result import Result
from tests import goldens
from tests.cli.goldens import generate
from tests.cli.test_goldens import LAYERS, SUPPORTED, check
from tests.engine.support import (
    DEADLINE,
    Work,
    alone,
    as_if_asked_for,
    let_pass,
    make_engine,
    nested_work,
    outcome,
    random_work,
)

pytestmark = pytest.mark.soak

STEPS = 4000
COMPARED = 0.1  # share of the requests that are run again, alone


def limits(rng: random.Random) -> dict[str, Any]:
    """Memory and budgets that are mostly too small."""
    return {
        "max_num_seqs": rng.randint(1, 8),
        "max_model_len": 32,
        "max_row_layers": rng.choice([None, 1, 50, 200, 600]),
        "page_size": rng.choice([1, 3, 4, 16]),
        "store_budget_tokens": rng.choice([4, 10, 16, 40]),
        "eviction": rng.choice(["fifo", "lru"]),
        "max_refreshes": rng.choice([None, 1, 2]),
        "prefix_match": rng.choice(["exact", "longest"]),
    }


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("seed", range(6))
def test_requests_come_and_go_for_thousands_of_steps(family: str, seed: int) -> None:
    """All policies, some cancelled or out of time in any phase; every page has its owners, company changes nothing."""
    rng = random.Random(f"soak {family} {seed}")
    chosen = limits(rng)
    engine = make_engine(family, overlap=seed % 2 > 0, **chosen)
    work: dict[str, Work] = {}
    results: dict[str, Result] = {}
    alive: list[str] = []
    step = 0
    while step < STEPS or engine.busy:
        if step < STEPS and engine.waiting < 4 and rng.random() < 0.5:
            item = rng.choice([random_work, nested_work])(rng, family, f"r{len(work)}")
            work[item.request.id] = item
            engine.add(item.asked)
            alive.append(item.request.id)
        if alive and rng.random() < 0.03:
            engine.cancel(rng.choice(alive))
        late = [name for name in alive if work[name].request.deadline_s and name not in results]
        if late and rng.random() < 0.02:
            still = {each.request.id for each in engine._lifecycle.waiting} | {
                each.request.id for each in engine._lifecycle.unfinished()
            }
            for name in still.intersection(rng.sample(late, 1)):
                let_pass(engine, name, DEADLINE)
        for event in engine.step():
            if event.result is not None:
                assert event.id not in results
                results[event.id] = event.result
                alive.remove(event.id)
        engine.check_integrity()
        if rng.random() < 0.005:
            engine.store.drop(rng.choice([None, *(entry.key for entry in engine.store.entries)]))
        step += 1
        assert step < 20 * STEPS, f"stuck with {engine.waiting} waiting and {engine.running} running"
    assert not alive
    assert {result.finish_reason for result in results.values()} == {"stop", "length", "cancelled", "timeout"}
    engine.store.drop()
    assert engine.allocator.used == 0
    store = {name: chosen[name] for name in ("store_budget_tokens", "max_model_len")}
    ended = [name for name, result in results.items() if result.finish_reason in ("stop", "length")]
    assert len(ended) > 100
    for name in rng.sample(ended, int(COMPARED * len(ended))):
        same = as_if_asked_for(work[name], results[name])
        assert outcome(results[name]) == outcome(alone(same, family, overlap=False, **store)), same


@pytest.mark.parametrize("model", goldens.MODELS)
@pytest.mark.parametrize(
    "options",
    [["--max-num-seqs", "1"], ["--max-num-seqs", "64"], ["--max-num-seqs", "1", "--overlap"], ["--overlap"]],
    ids=["alone", "together", "alone, ahead", "ahead"],
)
def test_all_golden_runs(tmp_path: Path, model: str, options: list[str]) -> None:
    """One at a time, and all that fit at once."""
    runs = {goldens.run_id(run): run for run in SUPPORTED if run["model"] == model}
    lines = (goldens.request_line(run, name) for name, run in runs.items())
    answers = generate(tmp_path, goldens.model_dir(model), lines, *options)
    assert set(answers) == set(runs)
    for name, run in runs.items():
        check(run, answers[name], LAYERS[model])
