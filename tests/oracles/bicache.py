"""Shared-prefix reuse, BiCache, and BiCache over block-dual (sections 3.1, 3.4, 3.5)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tests.oracles.canvas import Canvas
from tests.oracles.dense import KV, DenseModel, Pass
from tests.oracles.sampling import BlockSampler, Sampler

Boundary = Literal["stored", "recomputed"]
FillPass = Literal["separate", "transfer"]


@dataclass(frozen=True)
class Lease:
    """What a pass over a prefix alone left behind, on a canvas of some length: absent outside of the prefix."""

    rows: Tensor  # mask [T] of the prefix
    kv: KV
    states: Tensor  # as `Pass.states`


def usable(model: DenseModel, canvas: Canvas, prefix: int) -> int:
    """What may be leased of a prefix: Dream's row P-1 predicts the first response token and must stay live."""
    return min(prefix, canvas.prompt_length - 1 if model.dream else canvas.prompt_length)


def lease(model: DenseModel, canvas: Canvas, prefix: int) -> Lease:
    """Section 3.1: a pass over the prefix alone, without what follows it."""
    nothing = model.empty_kv(canvas.length)
    kv = KV(nothing.k.clone(), nothing.v.clone())
    states = torch.full((model.layers + 1, canvas.length, model.width), torch.nan, dtype=model.dtype)
    rows = torch.zeros(canvas.length, dtype=torch.bool)
    if prefix:
        out = model.forward(canvas.tokens[:prefix])
        kv.k[:, :prefix], kv.v[:, :prefix], states[:, :prefix] = out.kv.k, out.kv.v, out.states
        rows[:prefix] = True
    return Lease(rows, kv, states)


def refresh_pass(
    model: DenseModel, canvas: Canvas, leased: Lease, depth: int, live: Tensor, around: KV, boundary: Boundary
) -> Pass:
    """Section 3.4, a refresh: layers below `depth` read what is leased, from there on its rows are computed.

    `live` are the computed rows beside them, `around` the K/V of those that are not. The leased rows restart at
    layer `depth` from the leased boundary state; with `boundary="recomputed"` they instead run through the shallow
    layers too, attending to the leased K/V and the rest, and write no K/V there.
    """
    prefix = leased.rows
    given = leased.kv.below(depth).over(around)
    below = range(depth)
    if depth == model.layers or boundary == "stored":
        rows = [live if layer in below else live | prefix for layer in range(model.layers)]
        restored = {depth: leased.states[depth]} if depth < model.layers else None
        return model.forward(canvas.tokens, rows, given, restored)
    return model.forward(canvas.tokens, live | prefix, given, frozen=dict.fromkeys(below, prefix))


def refreshes(step: int, interval: int | None) -> bool:
    """Whether a step is a refresh; interval None means step 0 only."""
    return step == 0 if interval is None else step % interval == 0


def bicache(
    model: DenseModel,
    canvas: Canvas,
    sampler: Sampler,
    prefix: int,
    depth: int,
    interval: int | None,
    boundary: Boundary = "stored",
) -> None:
    """Section 3.4: what is not leased is computed in each step, deep layers of the rest every `interval` steps."""
    leased = lease(model, canvas, usable(model, canvas, prefix))
    suffix = ~leased.rows
    nothing = model.empty_kv(canvas.length)
    while not sampler.done:
        if refreshes(sampler.step, interval):
            out = refresh_pass(model, canvas, leased, depth, suffix, nothing, boundary)
            saved = out.kv.only(~suffix)
        else:
            out = model.forward(canvas.tokens, suffix, saved)
        canvas.ran(out.rows)
        sampler.commit(model.predictions(out.logits))


def reuse(model: DenseModel, canvas: Canvas, sampler: Sampler, prefix: int) -> None:
    """Section 3.4 with b = n: the stored K/V in all layers, never recomputed."""
    bicache(model, canvas, sampler, prefix, model.layers, None)


def bicache_block_dual(
    model: DenseModel,
    canvas: Canvas,
    sampler: BlockSampler,
    prefix: int,
    depth: int,
    interval: int | None,
    fill_pass: FillPass = "separate",
    boundary: Boundary = "stored",
) -> None:
    """Section 3.5: BiCache between prefix and suffix, the dual cache inside the suffix.

    A block's first step fills the dual cache from all suffix rows. That pass is extra and transfers nothing
    ("separate"), or it is the step itself ("transfer", as in section 2.4). All other passes compute the block, and on
    refresh steps the prefix' deep layers.
    """
    if model.dream:
        raise ValueError("section 3.5 describes LLaDA only")
    leased = lease(model, canvas, prefix)
    suffix = ~leased.rows
    nothing = model.empty_kv(canvas.length)
    while not sampler.done:
        refresh = refreshes(sampler.step, interval)
        block = canvas.span(sampler.start, sampler.stop)
        if sampler.block_step == 0:
            if refresh:
                out = refresh_pass(model, canvas, leased, depth, suffix, nothing, boundary)
                saved = out.kv.only(leased.rows)
                refresh = False
            else:
                out = model.forward(canvas.tokens, suffix, saved)
            dual = out.kv.only(suffix & ~block)
            canvas.ran(out.rows)
            if fill_pass == "transfer":
                sampler.commit(out.logits)
                continue
        if refresh:
            out = refresh_pass(model, canvas, leased, depth, block, dual, boundary)
            saved = out.kv.only(leased.rows)
        else:
            out = model.forward(canvas.tokens, block, saved.over(dual))
        canvas.ran(out.rows)
        sampler.commit(out.logits)
