"""`uniform-cache` with `drift`, and choices that layers share: plans that shrink while they run.

`test_uniform_against_oracles` has the values.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.engine.engine import Engine
from remask.machine.transfers import fetch
from remask.model.pool import Pool
from remask.model.stage import Pick, Stage
from remask.model.transformer import Transformer
from remask.plan.plan import Plan, View
from remask.plan.spans import Span, SpanMemo
from remask.policies import CachePolicy
from remask.policies.base import Kept, Traits
from remask.policies.uniform_cache import Drift, UniformCache
from tests.engine import kinds
from tests.engine.support import MODELS, Work, outcome, poisoned_engine, policy_of, request, run

PROMPT, BLOCK, CANVAS = 6, 4, 24
MODEL = "gidd, hybrid"  # of three layers


def work(name: str, policy: CachePolicy, **sampling: Any) -> Work:
    shape = {"max_tokens": 8, "block_length": BLOCK, "canvas_length": CANVAS, "seed": 3, **sampling}
    return Work(request(name, kinds.tokens(random.Random(name), PROMPT), **shape), policy)


def engine() -> Engine:
    return poisoned_engine(kinds.checkpoint(MODEL).model, max_num_seqs=8)


@pytest.mark.parametrize(("drift", "deep"), [(2.0, 0), (None, 1)])
def test_a_threshold_beyond_all_distances_computes_one_layer(drift: float | None, deep: int) -> None:
    layers = kinds.checkpoint(MODEL).model.config.layers
    result = run(engine(), [work("r", UniformCache(0, drift=drift), steps_per_block=4)])["r"]
    assert result.usage.row_layers == 2 * (CANVAS * layers + 3 * BLOCK * (1 + deep * (layers - 1)))


def test_a_lower_threshold_computes_more() -> None:
    policies = [UniformCache(2, drift=drift) for drift in (2.0, 0.3, 0.1, 0.01, 0.0)] + [UniformCache(2)]
    results = run(engine(), [work(str(number), policy) for number, policy in enumerate(policies)])
    costs = [results[str(number)].usage.row_layers for number in range(len(policies))]
    assert costs[0] < min(costs[1:])
    assert costs[-1] == max(costs)
    assert len({*costs}) > 3


def test_one_host_read_a_layer_however_many_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def fetched(tensor: Tensor) -> Any:
        reads.append(len(tensor))
        return fetch(tensor)

    monkeypatch.setattr("remask.policies.on_device.fetch", fetched)
    layers = kinds.checkpoint(MODEL).model.config.layers
    run(engine(), [work(str(number), UniformCache(0, drift=0.1), steps_per_block=3) for number in range(3)])
    assert reads == [3 * BLOCK] * (2 * 2 * (layers - 1)), "of two steps in each of two blocks"


@pytest.mark.parametrize("times", [1, 2])
def test_what_was_held_stands_where_a_pass_is_repeated(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A pass fails once or twice after its last layer has written: what it compared it would find changed."""
    items = [work(str(number), UniformCache(2, drift=0.1)) for number in range(3)]
    items += [work("whole", UniformCache(2))]
    undisturbed = run(engine(), items)
    failures = list[Stage]()
    real = Transformer.run

    def failing(self: Transformer, stage: Stage, h: Tensor, pool: Pool) -> Tensor:
        out = real(self, stage, h.clone(), pool)
        if stage.partial is not None and stage.layers.start == self.config.layers - 1 and len(failures) < times:
            failures.append(stage)
            raise RuntimeError("once")
        return out

    monkeypatch.setattr(Transformer, "run", failing)
    disturbed = run(engine(), items)
    assert len(failures) == times
    for name, result in undisturbed.items():
        assert outcome(disturbed[name]) == outcome(result)


@dataclass(frozen=True)
class Planned(CachePolicy):
    """Plans a full pass, then compares drift in bad ways."""

    how: str

    @property
    def traits(self) -> Traits:
        keeps: frozenset[Kept] = frozenset() if self.how == "no outputs" else frozenset({"outputs"})
        return Traits(kinds=("uniform",), keeps=keeps)

    def plan(self, view: View) -> Plan:
        if not view.step:
            rows = view.rows(0, view.length - 1) if self.how == "never computed" else view.everything
            return Plan((Span(range(view.layers), rows),), view.candidates)
        rows = view.rows(view.block.start, view.length)
        among = view.everything if self.how == "dead rows" else rows
        threshold = -0.5 if self.how == "negative" else 0.5
        spans = [Span(range(i, i + 1), rows) for i in range(view.layers)]
        if self.how == "two layers":
            spans = [spans[0], Span(range(1, view.layers), rows)]
        return Plan(spans, view.candidates, hook=Drift(among, threshold))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("two layers", "a span of its own without a pick, got 2 layers"),
        ("negative", "the threshold must be >= 0"),
        ("dead rows", "all compared rows must be computed"),
        ("no outputs", "on a canvas that keeps none"),
        ("never computed", "never written|never computed"),
    ],
)
def test_a_bad_comparison_ends_its_own_request_only(how: str, message: str) -> None:
    good = work("good", UniformCache(0, drift=0.1))
    results = run(engine(), [good, work("bad", Planned(how))])
    assert results["bad"].error is not None
    assert any(each in results["bad"].error for each in message.split("|"))
    assert outcome(results["good"]) == outcome(run(engine(), [good])["good"])


def test_what_stands_still_is_held_by_its_own_threshold() -> None:
    rows = np.ones(4, dtype=np.bool_)
    drift = Drift(rows, 0.1)
    plan = Plan((Span(range(1), rows), Span(range(1, 2), rows)), rows, hook=drift)
    held = np.array([True, False, True, False])
    after = drift.hold(plan, 1, held)
    assert (plan.cost, after.cost) == (8, 6)
    assert (plan.may_change, after.may_change) == (True, False)
    assert after.spans[1].computed.tolist() == [False, True, False, True]
    short = after.below(np.full(4, 3), SpanMemo())
    assert isinstance(short.hook, Drift)
    assert short.hook.candidates.tolist() == [True, True, True, False]


def dllm(layers: int) -> CachePolicy:
    return policy_of("dllm-cache", response_interval=5, ratio=0.4, select_layers=layers)


@pytest.mark.parametrize(("layers", "choosing"), [(1, [1, 2, 3]), (2, [1, 3]), (3, [1])])
def test_only_the_first_layer_of_those_that_share_compares(
    monkeypatch: pytest.MonkeyPatch, layers: int, choosing: list[int]
) -> None:
    compared: list[int] = []
    rows: list[list[int]] = []
    choose, partial_layer = Transformer._pick_rows, Transformer._run_partial_layer

    def watched(self: Transformer, h: Any, layer: int, *rest: Any) -> Any:
        compared.append(layer)
        return choose(self, h, layer, *rest)

    def layer_run(self: Transformer, h: Any, layer: int, stage: Any, pool: Pool, *rest: Any) -> Any:
        out = partial_layer(self, h, layer, stage, pool, *rest)
        picks: tuple[Pick, ...] = stage.partial.picks
        rows.extend(sorted(pick.picked_rows[-1].tolist()) for pick in picks)
        return out

    monkeypatch.setattr(Transformer, "_pick_rows", watched)
    monkeypatch.setattr(Transformer, "_run_partial_layer", layer_run)
    engine = poisoned_engine(MODELS["llada"])
    run(engine, [Work(request("r", 10, steps=4, max_tokens=8), dllm(layers))])
    passes = len(rows) // 3
    assert passes == 3, "the first of four renews all"
    assert compared == choosing * passes
    for start in range(0, len(rows), 3):
        for layer in range(1, 4):
            first = layer - (layer - 1) % layers
            assert rows[start + layer - 1] == rows[start + first - 1]


def test_rows_are_marked_on_the_device_once_they_are_needed() -> None:
    engine = poisoned_engine(MODELS["llada"])
    run(engine, [Work(request("r", 10), dllm(1))])
    assert engine.pool._picked is None
    run(engine, [Work(request("s", 10), dllm(2))])
    assert engine.pool.picked.dtype == torch.bool
