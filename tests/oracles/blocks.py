"""Decoders without a cache and with Fast-dLLM's block caches (sections 1, 2.2-2.4, 2.7, 6)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.canvas import Canvas
from tests.oracles.dense import DenseModel
from tests.oracles.sampling import (
    BlockSampler,
    Sampler,
    block_steps,
    block_windows,
    dream_confidence,
    ranked,
    share,
    take_threshold,
    timesteps,
)


def unconditional(model: DenseModel, canvas: Canvas) -> Tensor:
    """Section 1, CFG: the canvas with its prompt masked and its generated tokens kept."""
    return canvas.tokens.where(~canvas.span(0, canvas.prompt_length), model.mask_id)


def none(model: DenseModel, canvas: Canvas, sampler: Sampler, cfg_scale: float = 0.0) -> None:
    """Everything is computed in every pass; with guidance a pair of branches is one pass of twice the rows."""
    while not sampler.done:
        tail = sampler.tail if isinstance(sampler, BlockSampler) else None
        out = model.forward(canvas.tokens[:tail])
        logits, rows = out.logits, out.rows
        if cfg_scale > 0:
            blind = model.forward(unconditional(model, canvas)[:tail])
            logits = blind.logits + (cfg_scale + 1) * (logits - blind.logits)
            rows = [2 * count for count in rows]
        canvas.ran(rows)
        predictions = model.predictions(logits)
        absent = (0, 0, 0, canvas.length - len(predictions))
        sampler.commit(F.pad(predictions, absent, value=torch.nan))


def block_cache(model: DenseModel, canvas: Canvas, sampler: BlockSampler, dual: bool) -> None:
    """Sections 2.3 and 2.4: a full pass opens a block and already transfers.

    Later passes compute the rows from the block's start on, with `dual` the block alone; the others stay cached.
    """
    while not sampler.done:
        if sampler.block_step == 0:
            out = model.forward(canvas.tokens)
            rows = canvas.span(sampler.start, sampler.stop if dual else canvas.length)
            cached = out.kv.only(~rows)
        else:
            out = model.forward(canvas.tokens, rows, cached)
        canvas.ran(out.rows)
        sampler.commit(model.predictions(out.logits))


def dream_block_cache(
    model: DenseModel,
    canvas: Canvas,
    block_length: int,
    dual: bool,
    threshold: float | None = None,
    steps: int | None = None,
) -> None:
    """Section 2.7: the full pass commits the block's first position alone, which no cached pass could predict.

    Where that is given, the full pass is a step as any other.
    With `threshold` a block runs until it is complete; else `steps`, over all blocks, follow a time grid per block and
    rank by entropy. One step a block leaves the original's canvas unfinished and is refused.
    """
    windows = block_windows(canvas, block_length)
    for (start, stop), per_block in zip(windows, block_steps(canvas, windows, steps), strict=True):
        block = canvas.span(start, stop)
        opens = bool(canvas.noisy[start])
        out = model.forward(canvas.tokens)
        rows = canvas.span(start, stop if dual else canvas.length)
        cached = out.kv.only(~rows)
        canvas.ran(out.rows)
        logits = model.predictions(out.logits)
        if threshold is None:
            if steps is None or per_block < 2:
                raise ValueError("the entropy schedule needs two steps a block or more")
            times = timesteps(per_block, 1e-3)
        step = 0
        if opens:
            canvas.transfer([start], logits)
            step = 1
        while (canvas.noisy & block).any():
            if step:
                out = model.forward(canvas.tokens, rows, cached)
                canvas.ran(out.rows)
                logits = model.predictions(out.logits)
            candidates = canvas.noisy & block
            if threshold is not None:
                confidence = logits.softmax(-1).amax(-1)
                chosen = take_threshold(confidence, ranked(confidence, candidates), threshold)
            else:
                masks = int(candidates.sum())
                count = masks if step == per_block - 1 else share(masks, times, step)
                chosen = ranked(dream_confidence(logits, "entropy"), candidates)[:count]
            canvas.transfer(chosen, logits)
            step += 1
