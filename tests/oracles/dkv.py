"""dKV-Cache for LLaDA (section 5) and Dream (section 7)."""

import math

import torch
from torch import Tensor

from tests.oracles.canvas import Canvas
from tests.oracles.dense import DenseModel
from tests.oracles.sampling import BlockSampler, Sampler


def llada_decode(model: DenseModel, canvas: Canvas, sampler: BlockSampler, interval: int) -> None:
    """Section 5.1: what was known before a pass is cached from it, and left out from the next pass on.

    Each block starts anew; its first pass leaves nothing behind, so that the second is full as well.
    """
    stored, cached = model.empty_kv(canvas.length), torch.zeros(canvas.length, dtype=torch.bool)
    while not sampler.done:
        step, known = sampler.block_step, canvas.known
        if step < 2 or step % interval == 0:
            out = model.forward(canvas.tokens)
        else:
            out = model.forward(canvas.tokens, ~cached, stored.only(cached))
        stored, cached = out.kv, known
        canvas.ran(out.rows)
        sampler.commit(out.logits)


def llada_greedy(
    model: DenseModel,
    canvas: Canvas,
    sampler: BlockSampler,
    interval: int,
    window: int,
    centre: str = "current",
    extent: str = "noisy",
) -> None:
    """Section 5.2: a pass computes the positions of the last and of this step, and a window around the latter.

    With `centre` "previous" the window stands around the positions of the last step, from the left. With `extent`
    "interval" it is the paper's W = {i : D - ceil(w / 2) <= i <= D + floor(w / 2)}, whatever stands there.
    """
    stored = model.empty_kv(canvas.length)
    last: list[int] = []
    while not sampler.done:
        now = sampler.upcoming()
        if sampler.block_step % interval == 0:
            out = model.forward(canvas.tokens)
        else:
            centres = now if centre == "current" else sorted(last)
            if extent == "interval":
                active = _with_interval(canvas, [*last, *now], centres, window)
            else:
                active = _with_window(canvas, [*last, *now], centres, window)
            out = model.forward(canvas.tokens, active, stored.only(~active))
        stored, last = out.kv, now
        canvas.ran(out.rows)
        sampler.commit(out.logits)


def _with_interval(canvas: Canvas, positions: list[int], centres: list[int], window: int) -> Tensor:
    """`positions`, and all of the canvas that lies in the interval around any of `centres`."""
    at = torch.arange(canvas.length)
    active = torch.isin(at, torch.tensor(positions))
    for centre in centres:
        active |= (at >= centre - math.ceil(window / 2)) & (at <= centre + math.floor(window / 2))
    return active


def _with_window(canvas: Canvas, positions: list[int], centres: list[int], window: int) -> Tensor:
    """`positions`, and per centre up to `window` others, left and right in turn, moving outward.

    Eligible is what was noisy before the last step's transfers. Those transfers are in `positions` already, so what is
    noisy now says the same.
    """
    active = torch.zeros(canvas.length, dtype=torch.bool)
    active[positions] = True
    for centre in centres:
        added = 0
        for distance in range(1, canvas.length):
            for place in (centre - distance, centre + distance):
                if added < window and 0 <= place < canvas.length and canvas.noisy[place] and not active[place]:
                    active[place] = True
                    added += 1
    return active


def dream_cacheable(canvas: Canvas, shift: str) -> Tensor:
    """Section 7: the rows whose K/V may be cached, given what is known now.

    Token p + 1 comes from row p, so "un" caches that row. "right" caches the row one to the right of it, row p + 1,
    once the same token is known: a row goes with the token that stands in it, and not with the one that it predicts.
    """
    if shift not in ("un", "right", "un_right"):
        raise ValueError(f"unusable shift {shift!r}")
    known = canvas.known
    following = torch.cat([known[1:], known[:1]])
    if shift == "un":
        return following
    if shift == "right":
        return following.roll(1)
    both = known & following
    both[-1] = both[-2]
    return both


def dream_decode(
    model: DenseModel, canvas: Canvas, sampler: Sampler, interval: int, shift: str = "un", prefill: bool = False
) -> None:
    """Sections 7.1 and, with `prefill`, 7.3: row p is cached once token p+1 is known, one step late.

    With `prefill` the prompt rows but the last are cached by the first pass for good, and a refresh leaves them out.
    With shift "right" row p is cached once token p is known. A cached row that predicts a noisy position of the block
    is computed for its logits, and its K/V stay as they are cached.
    """
    prompt = canvas.span(0, canvas.prompt_length - 1)
    fixed = prompt if prefill else torch.zeros_like(prompt)
    stored, cached = model.empty_kv(canvas.length), torch.zeros_like(prompt)
    while not sampler.done:
        cacheable = dream_cacheable(canvas, shift)
        if shift == "un" and sampler.step == 0:
            cacheable[-1] = False  # nothing follows the last row, and it is cached one step later
        if sampler.step == 0:
            out = model.forward(canvas.tokens)
        else:
            kept = fixed if sampler.step % interval == 0 else cached | fixed
            live, frozen = ~kept, None
            if shift == "right":
                stale = kept & torch.cat([_wanted(canvas, sampler)[1:], torch.tensor([False])])
                live, frozen = live | stale, dict.fromkeys(range(model.layers), stale)
            out = model.forward(canvas.tokens, live, stored.only(kept), frozen=frozen)
        stored, cached = out.kv, cacheable
        canvas.ran(out.rows)
        sampler.commit(model.predictions(out.logits))


def _wanted(canvas: Canvas, sampler: Sampler) -> Tensor:
    """Noisy positions of the block that is decoded, or of the whole response."""
    if isinstance(sampler, BlockSampler):
        return canvas.noisy & canvas.span(sampler.start, sampler.stop)
    return canvas.noisy


def dream_prefill(model: DenseModel, canvas: Canvas, sampler: Sampler) -> None:
    """Section 7.2: the prompt rows but the last come from the first pass; everything else is always computed."""
    prompt = canvas.span(0, canvas.prompt_length - 1)
    while not sampler.done:
        if sampler.step == 0:
            out = model.forward(canvas.tokens)
            stored = out.kv.only(prompt)
        else:
            out = model.forward(canvas.tokens, ~prompt, stored)
        canvas.ran(out.rows)
        sampler.commit(model.predictions(out.logits))
