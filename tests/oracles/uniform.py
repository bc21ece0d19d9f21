"""Block-wise generation with uniform noise: without a cache, with a prefix cache, and Uniform-Cache.

A canvas holds the prompt, the response, and noise beyond it that is never updated but is seen. Blocks are denoised from
left to right; what stands left of the current block is clean, it and all after it is noisy.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracles.canvas import Decode
from tests.oracles.dense import KV
from tests.oracles.gidd import GiddModel, GiddPass, structured
from tests.oracles.uniform_drift import KeptOutputs
from tests.oracles.uniform_sampling import Noise, adaptive_scores, adaptive_selection, schedule

Pick = Callable[["Step"], Tensor]


@dataclass(frozen=True)
class Blocks:
    """How a response is cut: block b is positions prompt + b * length and following; `steps` per block.

    `given` are the positions of the response that have their tokens from the start. A block in which the response has
    no others is left out.
    """

    prompt: int
    response: int
    length: int
    steps: int
    canvas: int
    given: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        """How many blocks cover the response; the last may reach beyond it."""
        return -(-self.response // self.length)

    def window(self, block: int) -> tuple[int, int]:
        """First position and end of a block."""
        start = self.prompt + block * self.length
        return start, min(start + self.length, self.canvas)

    @property
    def worked(self) -> list[int]:
        """The blocks that are denoised."""
        end = self.prompt + self.response
        windows = [(block, *self.window(block)) for block in range(self.count)]
        return [block for block, start, stop in windows if not self.given >= set(range(start, min(stop, end)))]

    def open(self, block: int) -> Tensor:
        """Which positions of a block's window may change."""
        return torch.tensor([position not in self.given for position in range(*self.window(block))])


@dataclass(frozen=True)
class Step:
    """What a step decides on: the pass it ran, and the window's tokens and logits."""

    block: int
    number: int  # 1-based within the block
    log_snr: float
    start: int  # the window's first position
    stop: int
    out: GiddPass
    tokens: Tensor  # [L] of the window, before the step
    logits: Tensor  # [L, V] of the window, banned tokens at -inf
    free: Tensor  # [L], which tokens of the window may change


class Strategy:
    """Decides what a step computes. Subclasses keep K/V from pass to pass; nothing survives a block."""

    def __init__(self, model: GiddModel, blocks: Blocks) -> None:
        self.model, self.blocks = model, blocks
        self.positions = torch.arange(blocks.canvas)
        self.stored: KV | None = None

    def run(self, tokens: Tensor, block: int, step: int) -> GiddPass:
        """The pass of step number `step` (from 1) of a block over the canvas `tokens`."""
        raise NotImplementedError

    def everything(self, tokens: Tensor, block: int) -> GiddPass:
        """All rows, under the structured mask where the model was trained so."""
        seen = structured(self.positions >= self.blocks.window(block)[0]) if self.model.structured else None
        return self.model.forward(tokens, visible=seen)

    def seen(self, block: int) -> Tensor | None:
        """What rows see in a pass over some of them."""
        return structured(self.positions >= self.blocks.window(block)[0]) if self.model.structured else None


class Uncached(Strategy):
    """Every row in every step."""

    def run(self, tokens: Tensor, block: int, step: int) -> GiddPass:  # noqa: ARG002  (every step is the same)
        return self.everything(tokens, block)


class PrefixCache(Strategy):
    """The clean rows once per block, alone; every step computes the rest."""

    def run(self, tokens: Tensor, block: int, step: int) -> GiddPass:
        start, _ = self.blocks.window(block)
        if not self.model.structured:  # clean rows see noise: their K/V are those of the block's first step
            out = self.everything(tokens, block)
            if step > 1:
                out = self.model.forward(tokens, self.positions >= start, self.stored)
            self.stored = out.kv
            return out
        if step == 1:
            self.stored = self.model.forward(tokens[:start]).kv.padded(len(tokens))
        return self.model.forward(tokens, self.positions >= start, self.stored)


class UniformCache(Strategy):
    """A block's first step computes all, later ones the block alone, every `refresh_next`-th the next block too.

    `refresh_next` 0 means never. There is a next block only while the response has one. With `drift`, layers of the
    later steps compute only what has moved further than that.
    """

    def __init__(
        self, model: GiddModel, blocks: Blocks, refresh_next: int, border: str = "full", drift: float | None = None
    ) -> None:
        super().__init__(model, blocks)
        self.refresh_next, self.border = refresh_next, border
        self.kept = None if drift is None else KeptOutputs(model, blocks.canvas, drift)

    def run(self, tokens: Tensor, block: int, step: int) -> GiddPass:
        if step == 1 and (block == self.blocks.worked[0] or self.border == "full"):
            out = self.computed(tokens, self.positions >= 0, self.seen(block), compares=False)
        elif step == 1:
            start, stop = self.blocks.window(block)
            rows = (self.positions >= 2 * start - stop) & (self.positions < stop)
            out = self.computed(tokens, rows, self.seen(block), compares=False)
        else:
            refresh = self.refresh_next > 0 and step % self.refresh_next == 0 and block + 1 < self.blocks.count
            start, stop = self.blocks.window(block)[0], self.blocks.window(block + refresh)[1]
            rows = (self.positions >= start) & (self.positions < stop)
            out = self.computed(tokens, rows, None, compares=True)
        self.stored = out.kv
        return out

    def computed(self, tokens: Tensor, rows: Tensor, visible: Tensor | None, compares: bool) -> GiddPass:
        """A pass over `rows`."""
        if self.kept is None:
            return self.model.forward(tokens, rows, self.stored, visible)
        return self.kept.forward(tokens, rows, self.stored, visible, compares)


def strategy(model: GiddModel, blocks: Blocks, cache: str, config: Mapping[str, Any]) -> Strategy:
    """The strategy that a request line's `cache` and `cache_config` name."""
    match cache:
        case "none":
            return Uncached(model, blocks)
        case "block-prefix":
            return PrefixCache(model, blocks)
        case "uniform-cache":
            return UniformCache(model, blocks, **config)
    raise ValueError(f"no oracle for cache {cache!r}")


def generate(
    model: GiddModel,
    tokens: Tensor,
    blocks: Blocks,
    how: Strategy,
    grid: Tensor,
    min_tokens: int,
    pick: Pick,
    revision: int = 0,
) -> Iterator[Step]:
    """Denoises the canvas `tokens` in place, step after step; `pick` gives the window's next tokens.

    `grid` is the log-SNR schedule of a block. MASK is never predicted, the end-of-text id not at the first `min_tokens`
    response positions. With `revision` the first step of a later block replaces so many tokens of completed ones.
    """
    for block in blocks.worked:
        start, stop = blocks.window(block)
        early = max(0, min_tokens + blocks.prompt - start)
        for number in range(1, blocks.steps + 1):
            out = how.run(tokens, block, number)
            replaced = (
                revised(model, tokens, out, blocks.prompt, start, min_tokens, revision, grid)
                if (revision and block and number == 1)
                else None
            )
            logits = out.logits[start:stop].clone()
            logits[:, model.mask_id] = -torch.inf
            logits[:early, model.eos_id] = -torch.inf
            log_snr = float(grid[blocks.steps - number + 1])
            before, free = tokens[start:stop].clone(), blocks.open(block)
            step = Step(block, number, log_snr, start, stop, out, before, logits, free)
            tokens[start:stop] = pick(step)
            if replaced is not None:
                tokens[blocks.prompt : start] = replaced
            yield step


def revised(
    model: GiddModel,
    tokens: Tensor,
    out: GiddPass,
    prompt: int,
    start: int,
    min_tokens: int,
    count: int,
    grid: Tensor,
) -> Tensor:
    """Completed tokens [prompt, start) of which the `count` that gain most have become their argmax.

    Those that the pass did not compute stay as they are.
    """
    logits, current = out.logits[prompt:start].clone(), tokens[prompt:start]
    logits[:, model.mask_id] = -torch.inf
    logits[:min_tokens, model.eos_id] = -torch.inf
    known = ~logits[:, 0].isnan()
    scores = torch.zeros(len(current), dtype=logits.dtype)
    scores[known] = adaptive_scores(logits[known], current[known], noise(model).pi(float(grid[0])))
    best = logits.nan_to_num(-torch.inf).argmax(-1).where(known, current)
    chosen = adaptive_selection(scores.where(best != current, 0.0), count)
    return best.where(chosen, current)


def noise(model: GiddModel) -> Noise:
    """The noise that a model was trained on."""
    return Noise(model.noise_shift, model.vocabulary, model.mask_id)


def greedy(model: GiddModel, tokens_per_step: int) -> Pick:
    """The adaptive sampler at temperature 0."""

    def pick(step: Step) -> Tensor:
        chosen = adaptive_selection(step_scores(model, step), tokens_per_step)
        return step.logits.argmax(-1).where(chosen & step.free, step.tokens)

    return pick


def step_scores(model: GiddModel, step: Step) -> Tensor:
    """The adaptive scores [L] of a step's window."""
    scores = torch.zeros(len(step.tokens), dtype=step.logits.dtype)
    free = step.free
    scores[free] = adaptive_scores(step.logits[free], step.tokens[free], noise(model).pi(step.log_snr))
    return scores


def decode(model: GiddModel, line: Mapping[str, Any]) -> Decode:
    """Decodes a request line with the adaptive sampler at temperature 0.

    No stop id is honoured. `transfers` lists, per step, the positions whose token changed. Every step runs: an engine
    that skips passes which could change nothing transfers the same. `rows` leaves the prefix strategy's passes over the
    prefix out.
    """
    sampling, config = line["sampling"], line.get("cache_config", {})
    if sampling.get("sampler", "adaptive") != "adaptive" or sampling.get("temperature", 0.0) != 0:
        raise ValueError("drawn tokens have no oracle: ask for the adaptive sampler at temperature 0")
    prompt = list(line["prompt_token_ids"])
    tokens = torch.tensor([*prompt, *sampling["initial_canvas"]])
    block = sampling["block_length"]
    steps = sampling.get("steps_per_block", block)
    given = {len(prompt) + place: token for place, token in enumerate(line.get("template", ())) if token is not None}
    tokens[list(given)] = torch.tensor(list(given.values()), dtype=torch.long)
    blocks = Blocks(len(prompt), sampling["max_tokens"], block, steps, len(tokens), frozenset(given))
    how = strategy(model, blocks, line["cache"], config)
    grid = schedule(sampling.get("schedule", "cosine"), steps, *model.log_snr_range)
    transfers, rows, before = [], [], tokens.clone()
    revision = sampling.get("revision_tokens", 0)
    pick = greedy(model, sampling.get("tokens_per_step", 1))
    for step in generate(model, tokens, blocks, how, grid, sampling.get("min_tokens", 0), pick, revision):
        rows.append(step.out.rows)
        changed = (tokens != before).nonzero()[:, 0]
        before = tokens.clone()
        if len(changed):
            transfers.append((len(rows) - 1, changed.tolist(), tokens[changed].tolist()))
    return Decode(tokens[blocks.prompt : blocks.prompt + blocks.response].tolist(), transfers, rows)
