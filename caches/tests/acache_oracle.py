"""ACache (section 5 of the semantics): a stored prefix; rows of it that masks attend to most are computed anew."""

import math

import torch
from torch import Tensor

from tests.oracles.bicache import Lease, lease, usable
from tests.oracles.canvas import Canvas
from tests.oracles.dense import DenseModel
from tests.oracles.sampling import BlockSampler, Sampler


def anchors(model: DenseModel, canvas: Canvas, leased: Lease, ratio: float) -> Tensor:
    """Mask [T] of the anchors. All rows outside of the prefix run once, over the stored K/V in all layers.

    The attention of the masks, normalised among the stored positions, is summed over masks, heads and layers.
    """
    stored = leased.rows.nonzero()[:, 0]
    count = math.ceil(ratio * len(stored))
    if count in (0, len(stored)):
        return leased.rows & (count > 0)
    out = model.forward(canvas.tokens, ~leased.rows, leased.kv)
    canvas.ran(out.rows)
    masks = canvas.noisy.nonzero()[:, 0]
    total = torch.zeros(len(stored), dtype=model.dtype)
    for layer in range(model.layers):
        reaching = masks[model.seen(layer, masks, stored).any(1)]
        x = model.entering(layer, out.states[layer, reaching])
        scores = model.scores(layer, x, reaching, leased.kv.k[layer, stored], stored)
        total += scores.softmax(-1).sum((0, 1))
    ordered = total.sort(descending=True, stable=True)
    canvas.decided(float(ordered.values[count - 1] - ordered.values[count]))
    rows = torch.zeros_like(leased.rows)
    rows[stored[ordered.indices[:count]]] = True
    return rows


def acache(
    model: DenseModel,
    canvas: Canvas,
    sampler: Sampler,
    prefix: int,
    ratio: float,
    dual: bool = False,
    every: int | None = None,
) -> None:
    """What stands outside of the prefix is computed in each step, and the anchors in the first of each block.

    With `dual` the other steps compute the block alone. With `every` the anchors are computed in every so many steps
    of a block, the first one included.
    """
    leased = lease(model, canvas, usable(model, canvas, prefix))
    chosen = anchors(model, canvas, leased, ratio)
    given = leased.kv.only(~chosen)
    saved = leased.kv
    while not sampler.done:
        step = sampler.block_step if isinstance(sampler, BlockSampler) else sampler.step
        if step == 0:
            out = model.forward(canvas.tokens, ~leased.rows | chosen, given)
            rows = canvas.span(sampler.start, sampler.stop) if isinstance(sampler, BlockSampler) and dual else None
            saved = out.kv.only(leased.rows if rows is None else ~rows)
        else:
            live = ~leased.rows if rows is None else rows
            anew = every is not None and step % every == 0
            out = model.forward(canvas.tokens, live | chosen if anew else live, saved)
            saved = out.kv.only(chosen).over(saved)
        canvas.ran(out.rows)
        sampler.commit(model.predictions(out.logits))
