"""FLOPs, bytes and prefix work of plans, against counts made by hand and against a count row by row."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remask.families import preset
from remask.model.config import ModelConfig
from remask.model.weights import empty_weights
from remask.plan.cost import NOTHING, OPERATIONS, FeedForward, OperationCost, Widths
from remask.plan.pass_cost import ExecutedPlan, LayerWork, layer_work, pass_cost
from remask.plan.plan import NEVER, Plan, PrefixHit, View
from remask.plan.spans import Mask, Span, TopRho, rows_of
from remask.policies import BiCache, CachePolicy, Dense, DkvDecode, Reuse
from remask.policies.block import BlockDual
from remask.policies.dllm import DllmCache
from tests.policies.views import Walk

D, Q, K, UP, F, V, ITEM = 8, 12, 4, 20, 10, 50, 2
FEED = FeedForward(UP, F)
WIDTHS = Widths(hidden=D, queries=Q, keys=K, feeds=(FEED,) * 2, vocab=V, sink=False, itemsize=ITEM)
T = 6
ALL = np.ones(T, dtype=np.bool_)


def rows(*positions: int) -> Mask:
    out = np.zeros(T, dtype=np.bool_)
    out[list(positions)] = True
    return out


def plan_of(*spans: Span, predict: Mask | None = None) -> Plan:
    return Plan(spans, predict=rows() if predict is None else predict)


def test_windows() -> None:
    """Pairs and keys of a layer in which rows see one position to each side, beside a layer that sees everything."""
    widths = replace(WIDTHS, windows=(None, 1))
    full, some = (ExecutedPlan(plan_of(Span(range(2), live))) for live in (ALL, rows(0, 1, 5)))
    for passed, pairs, keys in ((full, T * T + 3 * T - 2, 2 * T), (some, 3 * T + 2 + 3 + 2, T + 5)):
        cost = pass_cost(widths, [passed]).operations["attention"]
        assert cost.flops == 4 * Q * pairs
        assert cost.kv_read == ITEM * 2 * K * keys
    limited = Plan((Span(range(2), ALL),), rows(), sees=np.array([2, 2, 4, 4, 6, 6]))
    near = 2 + 2 + 3 + 2 + 3 + 2
    assert pass_cost(widths, [ExecutedPlan(limited)]).operations["attention"].flops == 4 * Q * (24 + near)
    pick = Span(range(2), ALL, pick=TopRho(rows(0, 1, 2), 1), held=None)
    near = 3 + 3 + 3 + 2  # the row that is chosen may have three
    assert pass_cost(widths, [ExecutedPlan(plan_of(pick))]).operations["attention"].flops == 4 * Q * (4 * T + near)


def test_a_full_pass() -> None:
    cost = pass_cost(WIDTHS, [ExecutedPlan(plan_of(Span(range(2), ALL), predict=rows(3, 4)))])
    assert cost.repeated == 0
    assert cost.operations == {
        "projections": OperationCost(
            flops=2 * 2 * T * D * (2 * Q + 2 * K),
            weights=ITEM * 2 * D * (2 * Q + 2 * K),
            kv_written=ITEM * 2 * T * 2 * K,
            activations=ITEM * 2 * T * (2 * D + 2 * Q),
        ),
        "attention": OperationCost(
            flops=2 * 4 * T * T * Q, kv_read=ITEM * 2 * T * 2 * K, activations=ITEM * 2 * T * 2 * Q
        ),
        "mlp": OperationCost(
            flops=2 * 2 * T * D * (UP + F), weights=ITEM * 2 * D * (UP + F), activations=ITEM * 2 * T * (2 * D + UP + F)
        ),
        "head": OperationCost(flops=2 * 2 * D * V, weights=ITEM * D * V, activations=ITEM * 2 * (D + V)),
        "selection": OperationCost(),
        "watch": OperationCost(),
    }
    total = cost.total
    assert total.flops == sum(cost.operations[name].flops for name in OPERATIONS)
    assert total.bytes == sum(cost.operations[name].bytes for name in OPERATIONS)


def test_weights_are_read_once_however_many_canvases_pass() -> None:
    one = ExecutedPlan(plan_of(Span(range(2), rows(5)), predict=rows(5)))
    alone, both = pass_cost(WIDTHS, [one]), pass_cost(WIDTHS, [one, one])
    assert both.total == replace(alone.total + alone.total, weights=alone.total.weights)


def test_without_rows_there_is_no_cost() -> None:
    empty = plan_of(Span(range(1), rows()), Span(range(1, 2), rows()))
    assert pass_cost(WIDTHS, [ExecutedPlan(empty)]) == pass_cost(WIDTHS, []) == NOTHING


def test_a_layer_without_rows_reads_no_weights() -> None:
    cost = pass_cost(WIDTHS, [ExecutedPlan(plan_of(Span(range(1), ALL), Span(range(1, 2), rows())))])
    assert cost.total.weights == ITEM * D * (2 * Q + 2 * K + UP + F)


def test_rows_that_see_a_part_attend_to_that_part() -> None:
    sees = np.array([2, 2, 4, 4, 6, 6])
    plan = replace(plan_of(Span(range(2), rows(1, 2))), sees=sees)
    cost = pass_cost(WIDTHS, [ExecutedPlan(plan)]).operations["attention"]
    assert cost.flops == 2 * 4 * (2 + 4) * Q
    assert cost.kv_read == ITEM * 2 * 4 * 2 * K


def test_a_sink_is_a_key_whose_value_is_added() -> None:
    passed = ExecutedPlan(plan_of(Span(range(2), rows(0, 1, 2))))
    plain, sunk = (pass_cost(replace(WIDTHS, sink=sink), [passed]).operations["attention"] for sink in (False, True))
    assert sunk.flops - plain.flops == 2 * 2 * 3 * Q
    assert sunk.weights - plain.weights == ITEM * 2 * 2 * K


def test_looked_at_rows_project_one_side_and_chosen_ones_the_rest() -> None:
    live = rows(2, 3, 4, 5)
    span = Span(range(1), live, pick=TopRho(rows(3, 4, 5), 1), held=rows(2))
    cost = pass_cost(replace(WIDTHS, feeds=(FEED,) * 1), [ExecutedPlan(plan_of(span), keeps_outputs=True)])
    projections, selection = cost.operations["projections"], cost.operations["selection"]
    assert selection == OperationCost(
        flops=2 * D * 3 * K,
        weights=ITEM * D * K,
        kv_read=ITEM * 3 * K,
        kv_written=ITEM * 3 * K,
        activations=ITEM * 3 * D,
    ), "V of three rows"
    assert projections.flops == 2 * D * (2 * Q + K), "Q, K and output of one"
    assert cost.repeated == 2 * D * K, "V of the chosen row again"
    assert projections.kv_written == ITEM * K
    assert projections.states == ITEM * D * 2 * 4, "one row leaves its outputs, three add theirs"
    assert cost.operations["attention"].flops == 4 * T * Q


def test_frozen_rows_need_no_keys() -> None:
    cost = pass_cost(WIDTHS, [ExecutedPlan(plan_of(Span(range(2), ALL, frozen=rows(0, 1))))])
    full = pass_cost(WIDTHS, [ExecutedPlan(plan_of(Span(range(2), ALL)))])
    assert full.total.flops - cost.total.flops == 2 * 2 * 2 * D * 2 * K
    assert cost.repeated == 0
    assert cost.operations["projections"].kv_written == ITEM * 2 * (T - 2) * 2 * K


def test_states_that_are_kept_and_restored_move_once() -> None:
    deep = Span(range(1, 2), ALL, save=rows(4, 5))
    cost = pass_cost(WIDTHS, [ExecutedPlan(plan_of(Span(range(1), rows(3, 4, 5)), deep))])
    assert cost.total.states == ITEM * D * (3 + 2), "three rows rejoin, two are kept"


@pytest.mark.parametrize("hit", [PrefixHit(3, 1), PrefixHit(3, 0, 1)], ids=str)
def test_a_shared_prefix_is_read_once_where_it_is_lent(hit: PrefixHit) -> None:
    plan = plan_of(Span(range(2), rows(4, 5)))
    together = [ExecutedPlan(plan, hit, sharing_key=7)] * 3
    apart = [ExecutedPlan(plan, hit, sharing_key=number) for number in range(3)]
    reads = [pass_cost(WIDTHS, canvases).operations["attention"].kv_read for canvases in (together, apart)]
    assert reads == [ITEM * 2 * K * (3 + 3 * 3 + 3 * T), ITEM * 2 * K * (3 * T + 3 * T)]
    assert pass_cost(WIDTHS, together).total.flops == pass_cost(WIDTHS, apart).total.flops


def test_where_rows_see_their_neighbours_each_canvas_reads_its_own_keys() -> None:
    plan, widths = plan_of(Span(range(2), rows(4, 5))), replace(WIDTHS, windows=(None, 1))
    cost = pass_cost(widths, [ExecutedPlan(plan, PrefixHit(3, 2), sharing_key=7)] * 3).operations["attention"]
    assert cost.kv_read == ITEM * 2 * K * (3 + 3 * 3 + 3 * 3)


POLICIES: list[CachePolicy] = [
    Dense(),
    BlockDual(),
    DkvDecode(3),
    DllmCache(2, 3, 0.5, select="random"),
    DllmCache(3, 4, 0.5),
    DllmCache(100, 4, 0.0),
    BiCache(DkvDecode(2), 1),
    Reuse(),
]


@given(st.sampled_from(POLICIES), st.integers(1, 3), st.integers(0, 9))
def test_a_count_row_by_row_comes_to_the_same(policy: CachePolicy, layers: int, seed: int) -> None:
    walk = Walk(layers=layers, prompt=3, block_length=4, seed=seed)
    widths, total = replace(WIDTHS, feeds=(FEED,) * layers), NOTHING
    flops = dict.fromkeys(OPERATIONS, 0)
    for view in walk.views():
        plan = policy.plan(view)
        total += pass_cost(widths, [ExecutedPlan(plan)])
        for layer in range(layers):
            span = next(span for span in plan.spans if layer in span.layers)
            chosen = 0 if span.pick is None else span.pick.count
            for position in range(walk.length):
                looked = span.pick is not None and span.pick.candidates[position]
                full = span.rows[position] and not looked and not (span.held is not None and span.held[position])
                flops["selection"] += 2 * D * K * bool(looked)
                flops["projections"] += 2 * D * (2 * Q + 2 * K) * full
                flops["attention"] += 4 * Q * walk.length * full
                flops["mlp"] += 2 * D * (UP + F) * full
            flops["projections"] += 2 * D * (2 * Q + K) * chosen
            flops["attention"] += 4 * Q * walk.length * chosen
            flops["mlp"] += 2 * D * (UP + F) * chosen
        flops["head"] += 2 * D * V * int(plan.predict.sum())
    assert {name: total.operations[name].flops for name in OPERATIONS} == flops


EXPERTS = FeedForward(up=6, intermediate=3, experts=16, active=2, expert_up=8, expert_intermediate=4)


def test_a_row_pays_for_its_own_experts_and_the_pass_reads_what_its_rows_may_choose() -> None:
    widths = replace(WIDTHS, feeds=(FEED, EXPERTS))
    some = plan_of(Span(range(2), rows(1, 2, 5)))
    cost = pass_cost(widths, [ExecutedPlan(some)]).operations["mlp"]
    per_row = 16 + 6 + 3 + 2 * (8 + 4)
    assert cost.flops == 2 * 3 * D * (UP + F + per_row)
    assert cost.weights == ITEM * D * (UP + F + 16 + 6 + 3 + 3 * 2 * (8 + 4)), "three rows choose six experts at most"
    # The router reads a row and leaves 16 scores; the shared expert and two others read one and leave one.
    assert cost.activations == ITEM * 3 * (2 * D + UP + F + D + 3 * 2 * D + per_row)
    both = pass_cost(widths, [ExecutedPlan(some), ExecutedPlan(plan_of(Span(range(2), ALL)))]).operations["mlp"]
    assert both.flops == 3 * cost.flops
    assert both.weights == ITEM * D * (UP + F + 16 + 6 + 3 + 16 * (8 + 4)), "nine rows may choose all of them"


def test_layers_without_rows_read_no_experts() -> None:
    widths = replace(WIDTHS, feeds=(EXPERTS, EXPERTS))
    cost = pass_cost(widths, [ExecutedPlan(plan_of(Span(range(1), rows(0)), Span(range(1, 2), rows())))])
    assert cost.operations["mlp"].weights == ITEM * D * (16 + 6 + 3 + 2 * (8 + 4))


def mixed_config(rng: random.Random) -> ModelConfig:
    """A DiffusionGemma whose layers have windows, heads and feed-forwards of their own."""
    base, layers = preset("diffusion-gemma-tiny"), rng.randint(2, 6)
    assert base.sliding is not None
    assert base.mixture is not None
    near = sorted(rng.sample(range(layers), rng.randint(1, layers - 1)))
    dense = sorted(rng.sample(range(layers), rng.randint(0, layers)))
    return replace(
        base,
        layers=layers,
        hidden=rng.randrange(8, 40, 4),
        head_dim=rng.randrange(2, 24, 2),
        kv_heads=rng.choice((1, 2, 4)),
        intermediate=rng.randint(5, 60),
        vocab=rng.randint(20, 90),
        sliding=replace(
            base.sliding, layers=tuple(near), kv_heads=rng.choice((1, 2, 4)), head_dim=rng.randrange(2, 24, 2)
        ),
        mixture=replace(base.mixture, intermediate=rng.randint(3, 20), dense_layers=tuple(dense)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_models_whose_layers_differ_cost_what_their_matrices_hold(seed: int) -> None:
    """A pass over one canvas, all of it denoised and predicted: every row goes through every matrix once."""
    config = mixed_config(random.Random(seed))
    weights = empty_weights(config, torch.float32, torch.device("meta"))
    assert config.mixture is not None
    assert weights.signal is not None
    projected, computed, held = 0, 0, 0
    for layer in weights.layers:
        projected += layer.qkv.numel() + layer.out.numel()
        shared, own = layer.gate_up.numel() + layer.down.numel(), layer.mixture
        held += shared
        computed += shared
        if own is not None:
            experts = own.gate_up.numel() + own.down.numel()
            held += own.router.numel() + experts * min(T * config.mixture.active, config.mixture.experts) // len(
                own.down
            )
            computed += own.router.numel() + experts * config.mixture.active // len(own.down)
    signal = weights.signal.gate_up.numel() + weights.signal.down.numel()
    plan = plan_of(Span(range(config.layers), ALL), predict=ALL)
    cost = pass_cost(config.widths(ITEM), [ExecutedPlan(plan, noisy_count=T)]).operations
    assert cost["projections"].flops == 2 * T * projected
    assert cost["projections"].weights == ITEM * projected
    assert cost["mlp"].flops == 2 * T * (computed + signal)
    assert cost["mlp"].weights == ITEM * (held + signal)
    # The output matrix, and the same once more for the expected embedding.
    assert cost["head"].flops == 2 * T * 2 * weights.head.numel()
    assert cost["head"].weights == ITEM * 2 * weights.head.numel()
    assert cost["attention"].flops == 2 * T * T * 2 * sum(layer.out.shape[1] for layer in weights.layers)
    kv = 2 * sum(shape.kv_heads * shape.head_dim for shape in map(config.shape_of, range(config.layers)))
    assert cost["attention"].kv_read == cost["projections"].kv_written == ITEM * T * kv
    settled = pass_cost(config.widths(ITEM), [ExecutedPlan(plan)]).operations["mlp"]
    assert (settled.flops, settled.weights) == (2 * T * computed, ITEM * held), "final rows take nothing in"


LAYERS, PREFIX, LENGTH = 6, 5, 12
HIT = PrefixHit(PREFIX, 4)
LEAD = rows_of(range(PREFIX), LENGTH)


def some(*positions: int) -> Mask:
    mask = np.zeros(LENGTH, dtype=np.bool_)
    mask[list(positions)] = True
    return mask


def view(step: int, hit: PrefixHit | None = HIT) -> View:
    noisy = np.arange(LENGTH) >= 8
    settled = np.where(noisy, NEVER, -1).astype(np.int32)
    return View(LAYERS, step, step, range(8, LENGTH), 8, noisy, settled, hit)


SHORT, ABOVE, WHOLE = PrefixHit(PREFIX, 2), PrefixHit(PREFIX, 2, 3), PrefixHit(PREFIX, LAYERS)
SOME = Plan((Span(range(LAYERS), some(7, 8)),), some(7))
EVERY_THIRD = BiCache(depth=4, refresh_interval=3)
# Of each run of layers: rows, and of the prefix those that are reused, leased, restored and refreshed.
WORK: dict[str, tuple[Plan, PrefixHit | None, tuple[tuple[range, int, int, int, int, int], ...]]] = {
    "a refresh": (EVERY_THIRD.plan(view(3)), HIT, ((range(4), 7, 5, 5, 0, 0), (range(4, 6), 12, 0, 0, 5, 5))),
    "between refreshes": (EVERY_THIRD.plan(view(4)), HIT, ((range(4), 7, 5, 5, 0, 0), (range(4, 6), 7, 5, 0, 0, 0))),
    "rows that do not write leave the leased pages in use": (
        BiCache(depth=4, boundary_state="recomputed").plan(view(0)),
        HIT,
        ((range(4), 12, 5, 5, 0, 0), (range(4, 6), 12, 0, 0, 0, 5)),
    ),
    "a plan is cut where the lease ends": (SOME, SHORT, ((range(2), 2, 5, 5, 0, 0), (range(2, 6), 2, 5, 0, 0, 0))),
    "the layer above the boundary may be leased too": (
        BiCache(depth=2).plan(view(0, ABOVE)),
        ABOVE,
        ((range(2), 7, 5, 5, 0, 0), (range(2, 3), 12, 5, 5, 5, 0), (range(3, 6), 12, 0, 0, 0, 5)),
    ),
    "without a lease it is the request's own": (DkvDecode().plan(view(0, None)), None, ((range(6), 12, 0, 0, 0, 5),)),
    "and is reused": (SOME, None, ((range(6), 2, 5, 0, 0, 0),)),
    "reuse reads the store in all layers": (Reuse().plan(view(0, WHOLE)), WHOLE, ((range(6), 7, 5, 5, 0, 0),)),
}


@pytest.mark.parametrize("name", WORK)
def test_the_work_on_a_prefix(name: str) -> None:
    plan, hit, expected = WORK[name]
    assert layer_work(plan, LEAD, hit) == tuple(LayerWork(*each) for each in expected)


@pytest.mark.parametrize("prefix", [0, PREFIX])
def test_held_and_chosen_rows(prefix: int) -> None:
    everything = np.ones(LENGTH, dtype=np.bool_)
    held = Span(range(2), everything, held=some(0, 1, 2))
    pick = Span(range(2, LAYERS), everything, pick=TopRho(some(0, 1, 10), 2))
    first, second = layer_work(Plan((held, pick), some(11)), rows_of(range(prefix), LENGTH), None)
    assert (first.rows, first.reused, first.refreshed) == (9, min(prefix, 3), max(prefix - 3, 0))
    assert (second.rows, second.reused, second.refreshed) == (11, min(prefix, 2), max(prefix - 2, 0))
