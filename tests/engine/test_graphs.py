"""Layers that graphs repeat: the same answers, and nothing of spare rows anywhere."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from remask.checks import AttentionName
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.families import preset
from remask.model import graphs
from remask.model.graphs import round_up
from remask.model.transformer import Transformer
from remask.policies import BiCache, BlockDual, CachePolicy, Dense, Reuse
from remask.policies.dllm import DllmCache
from remask.policies.exact import Exact
from remask.policies.uniform_cache import UniformCache
from tests.engine.executors import NEEDS_TRITON
from tests.engine.kinds import checkpoint, tokens
from tests.engine.support import (
    LAYERS,
    MODELS,
    Work,
    alone,
    as_if_asked_for,
    lively_weights,
    make_engine,
    nested_work,
    outcome,
    poisoned_engine,
    random_work,
    request,
    run,
    small_config,
)
from tests.engine.test_isolation import bad_request, breaks_forward, comparing
from tests.sampling_fields import flat_params

SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 30))]


@pytest.mark.few(3)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_requests_of_all_kinds_get_the_same_answers(family: str, seed: int, overlap: bool) -> None:
    """Under any policy; memory around is full of NaN, and so are the buffers before each stage."""
    rng = random.Random(f"{family} {seed} {overlap}")
    store: dict[str, Any] = {"store_budget_tokens": rng.choice([10, 16, 40])}
    engine = make_engine(family, graphs=True, overlap=overlap, page_size=rng.choice([3, 4, 16]), **store)
    work = [rng.choice([random_work, random_work, nested_work])(rng, family, f"r{i}") for i in range(12)]
    results = run(engine, work, each_step=lambda _: engine.check_integrity())
    assert engine.graphs is not None
    assert engine.graphs.stage_count > 0
    plain: dict[str, Any] = {"overlap": False, "graphs": False, **store}
    for item in work:
        result = results[item.request.id]
        assert outcome(result) == outcome(alone(as_if_asked_for(item, result), family, **plain)), item


@pytest.mark.parametrize("name", ["sdar, blocks of 3", "gidd", "gidd, hybrid"])
def test_other_kinds_of_models(name: str) -> None:
    """Blocks in order, whose pages are shared, and models without a mask."""
    point, rng = checkpoint(name), random.Random(name)
    uniform = name.startswith("gidd")
    policies: list[CachePolicy] = [Dense(), UniformCache() if uniform else Exact(2 * point.block)]
    shared = tokens(rng, 4 * point.block)
    params: dict[str, Any] = {"block_length": 4, "max_tokens": 8} if uniform else {"max_tokens": 4 * point.block}
    work = [
        Work(Request(f"r{n}", shared + tokens(rng, 3), flat_params(seed=n, **params)), policy, joins=3 * n)
        for n, policy in enumerate(2 * policies)
    ]
    common: dict[str, Any] = {"page_size": 4 * point.block, "store_budget_tokens": 128}
    plain, repeated = (poisoned_engine(point.model, graphs=on, **common) for on in (False, True))
    expected, found = run(plain, work), run(repeated, work)
    assert repeated.graphs is not None
    assert repeated.graphs.stage_count > 0
    assert {name: outcome(result) for name, result in found.items()} == {
        name: outcome(result) for name, result in expected.items()
    }


POLICIES: list[CachePolicy] = [Dense(), Reuse(), BlockDual(), BiCache(BlockDual(), 2, 2), DllmCache(4, 2)]


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_nothing_but_what_is_written_changes(policy: CachePolicy) -> None:
    """All of K, V and outputs is what it is without graphs, but for the slot that no page has."""
    pools = []
    for on in (False, True):
        engine = make_engine(graphs=on)
        engine.add(Work(request(prefix=5), policy).asked)
        for _ in range(4):
            engine.step()
        engine.pool.allocate_outputs()
        pools.append(engine.pool)
    plain, repeated = ([*pool.k, *pool.v, *(x for pair in pool.outputs for x in pair)] for pool in pools)
    for one, other in zip(plain, repeated, strict=True):
        torch.testing.assert_close(one[:-1], other[:-1], equal_nan=True)


def test_steps_repeat_what_the_first_ones_captured() -> None:
    """One shape, in steps and in requests: two graphs a layer."""
    engine = make_engine(graphs=True, attention="torch")
    run(engine, [Work(request(f"r{i}"), Dense(), joins=20 * i) for i in range(2)])
    assert engine.graphs is not None
    assert (engine.graphs.capture_count, engine.graphs.stage_count) == (2 * LAYERS, engine.stats.steps)


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the shape before are gone when the next one has come, and are captured again."""
    monkeypatch.setattr(graphs, "MAX_SHAPES", 1)
    lengths = (4, 40, 4)  # prompts whose canvases fit into buffers of two sizes
    work = [Work(request(f"r{n}", length), Dense(), joins=20 * n) for n, length in enumerate(lengths)]
    engine = make_engine(graphs=True, attention="torch")
    results = run(engine, work)
    assert engine.graphs is not None
    assert engine.graphs.capture_count == len(lengths) * 2 * LAYERS
    assert [outcome(results[item.request.id]) for item in work] == [outcome(alone(item)) for item in work]


def test_stages_that_keep_outputs_have_graphs_of_their_own() -> None:
    """A full pass of `dllm-cache` behind one of `none` over as many rows: the former keeps what layers add."""
    work = [Work(request("plain"), Dense()), Work(request("kept"), DllmCache(4, 2), joins=20)]
    results = run(make_engine(graphs=True, attention="torch"), work)
    assert [outcome(results[item.request.id]) for item in work] == [outcome(alone(item)) for item in work]


@pytest.mark.parametrize(
    ("name", "rows"), [("llada-8b", 1024), ("llada-100m", 4096), ("llada-tiny", 4096), ("dream-7b", 1024)]
)
def test_the_larger_the_layers_the_fewer_rows_are_repeated(name: str, rows: int) -> None:
    """As far as launching them takes longer than computing them."""
    assert graphs.max_rows(preset(name)) == rows


def test_large_stages_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_ROWS", 4)
    engine, item = make_engine(graphs=True), Work(request(block_length=4), BlockDual())
    results = run(engine, [item])
    assert engine.graphs is not None
    assert 0 < engine.graphs.stage_count < engine.stats.steps, "whole passes are launched as ever"
    assert outcome(results["r"]) == outcome(alone(item))


@NEEDS_TRITON
@pytest.mark.few(2)
@pytest.mark.parametrize(("policy", "passes"), [(BiCache(BlockDual(), 1, 2), 3), (Dense(), 2)], ids=repr)
def test_attention_is_in_the_graph_where_it_launches_the_same(policy: CachePolicy, passes: int) -> None:
    """In Triton's interpreter. A stage of all layers is one graph, and others have one a layer."""
    config = replace(small_config("llada"), layers=2)
    model = Transformer(config, lively_weights(config, torch.float32))
    found, names = list[dict[str, Any]](), list[AttentionName](["torch", "triton"])
    for name in names:
        limits = EngineConfig(max_num_seqs=4, max_model_len=8, page_size=4, attention=name, graphs=name == "triton")
        engine = Engine(model, limits, "test")
        params: dict[str, Any] = {"max_tokens": 2, "steps": 2, "block_length": 2, "ignore_eos": True}
        for number in range(2):
            engine.add(Request(f"r{number}", [7] * 4 + [9 + number], flat_params(**params), 4, policy))
        found.append({name: result.token_ids for name, result in run(engine, []).items()})
    assert engine.graphs is not None
    assert engine.graphs.stage_count >= passes
    if policy == Dense():
        assert engine.graphs.capture_count == 1
    assert found[0] == found[1]


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_failure_between_graphs_ends_its_own_request(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is repeated in parts, whose graphs read what the failed one has left in the buffers no more."""
    good = comparing()
    expected = {item.request.id: outcome(alone(item)) for item in good}
    engine = make_engine(max_num_seqs=16, graphs=True)
    with monkeypatch.context() as patch:
        breaks_forward(engine, patch, "attend", layer)
        results = run(engine, [*good, Work(bad_request(), Dense(), 1)])
    assert results.pop("bad").finish_reason == "error"
    assert {name: outcome(result) for name, result in results.items()} == expected


def test_sizes_of_buffers_are_few_and_near() -> None:
    sizes = [round_up(rows) for rows in range(1, graphs.MAX_ROWS + 1)]
    assert len(set(sizes)) <= 33
    assert all(rows <= size <= max(rows + 1, 1.5 * rows) for rows, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * rows for rows, size in enumerate(sizes, 1) if rows > 256)
    assert all(round_up(size) == size for size in sizes)


@pytest.mark.parametrize(
    ("family", "limits", "message"),
    [
        ("llada", {"batch_invariant": True}, "graphs=True cannot be combined with batch_invariant"),
        ("llada", {"graphs": "yes"}, "graphs"),
        ("llada-moe", {}, "graphs=True needs a dense model"),
    ],
)
def test_what_cannot_be_repeated_is_refused(family: str, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(MODELS[family], EngineConfig(**{"graphs": True, **limits}), "test")
