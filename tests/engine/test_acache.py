"""ACache in the engine: its stored K/V are copied, and a pass tells the anchors. Oracles: `test_against_oracles`."""

from typing import Any

import numpy as np
import pytest
import torch

from remask.engine.canvas_state import Move
from remask.engine.engine import Engine
from remask.policies import ACache, CachePolicy, Dense, Reuse
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.dkv import DkvDecode
from tests.engine.support import (
    LAYERS,
    CheckedTransformer,
    Work,
    alone,
    lively_weights,
    make_engine,
    outcome,
    poisoned_engine,
    prompt_of,
    request,
    run,
    small_config,
    work_of,
)

FIRST = prompt_of(12, 1)


def asks(name: str, own: int, policy: CachePolicy, **sampling: Any) -> Work:
    """A request under the shared prefix, with so many tokens of its own."""
    return Work(request(name, FIRST + prompt_of(own, sum(map(ord, name))), len(FIRST), **sampling), policy)


def test_batch_invariance_holds_to_the_last_bit() -> None:
    config = small_config("llada")
    model = CheckedTransformer(config, lively_weights(config, torch.float32))

    def engine() -> Engine:
        return poisoned_engine(model, batch_invariant=True, max_num_seqs=8)

    work = [asks(str(number), own, ACache(ratio=0.4)) for number, own in enumerate((3, 5, 2))]
    work += [asks(f"r{number}", own, Reuse()) for number, own in enumerate((1, 4))]
    together = run(engine(), work)
    for item in work:
        assert outcome(together[item.request.id]) == outcome(run(engine(), [item])[item.request.id])


@pytest.mark.parametrize("source", [[4, 5, 6], [4, 7, 5]])
@pytest.mark.parametrize("target", [[20, 21, 22], [30, 12, 25]])
def test_copies_between_runs_and_scattered_slots(source: list[int], target: list[int]) -> None:
    """Where memory is in pieces, a stored prefix may be a run and the canvas' slots none, or the other way round."""
    engine = make_engine(page_size=1)
    pool, layers = engine.pool, engine.model.config.layers
    for tensor in (*pool.k, *pool.v):
        tensor.copy_(torch.randn(tensor.shape))
    before = [(k.clone(), v.clone()) for k, v in zip(pool.k, pool.v, strict=True)]
    engine.runner.move([Move(np.array(source), np.array(target), layers - 1)])
    for layer, (k, v) in enumerate(before):
        if layer < layers - 1:
            k[target], v[target] = k[source], v[source]
        assert torch.equal(pool.k[layer], k)
        assert torch.equal(pool.v[layer], v)


@pytest.mark.parametrize("family", ["llada", "dream", "llada-moe"])
def test_without_anchors_it_is_reuse(family: str) -> None:
    """The prefix is copied, in memory that holds NaN before."""
    plain, reused = (run(make_engine(family), [asks("r", 4, policy)])["r"] for policy in (ACache(ratio=0.0), Reuse()))
    assert outcome(plain)[:3] == outcome(reused)[:3]
    assert work_of(plain.usage) == work_of(reused.usage)


def test_other_requests_read_the_prefix_as_it_was() -> None:
    engine = make_engine("llada")
    before = run(engine, [asks("r", 4, Reuse())])["r"]
    run(engine, [asks("a", 3, ACache()), asks("b", 2, ACache(ratio=0.5))])
    after = run(engine, [asks("r", 4, Reuse())])["r"]
    assert outcome(before)[:3] == outcome(after)[:3]
    assert after.usage.cached_tokens == 12


def test_inputs_are_kept_for_one_pass_only() -> None:
    engine = make_engine("llada")
    engine.add(asks("r", 3, ACache()).asked)
    engine.step()  # the pass over the prefix
    assert engine.memory.extra_bytes == (LAYERS - 1) * 23 * 32 * 8
    engine.step()
    assert engine.memory.extra_bytes == 0
    (running,) = engine._lifecycle.unfinished()
    (branch,) = running.canvases
    assert branch.hook_output is not None
    assert branch.hook_output[:12].sum() == pytest.approx(8 * 4 * LAYERS), "8 masks, 4 heads, all layers"
    assert not branch.hook_output[12:].any()
    run(engine, [])


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("inner", [Dense(), BlockPrefix(), BlockDual(), DkvDecode()], ids=str)
def test_guidance_beside_the_pass_that_tells_the_anchors(family: str, inner: CachePolicy) -> None:
    """Only the canvas that reads the store has anchors, so the other one takes no part in the pass that tells them."""
    sampling: dict[str, Any] = {"cfg_scale": 1.0, "block_length": 4, "steps": 4}
    told, known = (asks("r", 4, ACache(inner, ratio), **sampling) for ratio in (0.2, 1.0))
    result, whole = alone(told, family), alone(known, family)
    assert (result.finish_reason, result.error) == ("length", None)
    assert outcome(run(make_engine(family), [told, Work(request("other"), Dense())])["r"]) == outcome(result)
    stored = result.usage.prefix_tokens
    canvas, anchors = len(told.request.prompt_token_ids) + 8, -(-stored // 5)
    asking, left_out = canvas - stored, stored - anchors
    assert result.usage.forwards == whole.usage.forwards + 1
    begun = 2  # blocks, in each of which one pass computes the anchors; the others compute no stored row in either run
    assert result.usage.row_layers == whole.usage.row_layers + LAYERS * (asking - begun * left_out)


def test_fill_passes_of_both_canvases_are_run_together() -> None:
    """A separate fill pass is run on both; what one of them was asked before it is not counted for the other."""
    sampling: dict[str, Any] = {"cfg_scale": 1.0, "block_length": 4, "steps": 4}
    item = asks("r", 5, ACache(BlockDual("separate"), 0.2), **sampling)
    engine, passes = make_engine(), list[list[int]]()
    whole = engine.runner.run

    def watched(items: Any) -> Any:
        passes.append([plan.cost // LAYERS for _, plan in items])
        return whole(items)

    engine.runner.run = watched  # type: ignore[method-assign]
    assert run(engine, [item])["r"].finish_reason == "length"
    stored, canvas, anchored = [12], 25, 13 + 3
    cached = [[4, 4], [4, 4]]
    assert passes == [stored, [13, canvas], [anchored], *cached, [anchored, canvas], *cached]
