"""Which positions a step transfers: LLaDA's block rules (sections 1, 2.1, 5.2) and Dream's canvas rules (2.6, 6)."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tests.oracles.canvas import Canvas


class Sampler(Protocol):
    """Decides step after step what becomes final; `logits` are indexed by the position they predict."""

    step: int

    @property
    def done(self) -> bool:
        """Whether no further step is due."""

    def commit(self, logits: Tensor) -> None:
        """Ends a step: transfers what the rule takes from these logits."""


@dataclass(frozen=True)
class Fixed:
    """Section 1: a schedule of counts per block; `steps` over all blocks, or one a token."""

    steps: int | None


@dataclass(frozen=True)
class Ordered:
    """Section 5.2: the counts of `Fixed`, the positions in a given order; one list per block."""

    steps: int | None
    order: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Threshold:
    """Section 2.1: the best candidate and every other of at least this confidence."""

    value: float


@dataclass(frozen=True)
class Factor:
    """Section 2.1: leading ranks n with confidence >= 1 - value / (n + 1)."""

    value: float


Choosing = Generator[list[int], tuple[Tensor, list[int]], None]
"""Is sent each step's confidences and noisy positions, and yields what to transfer."""


@dataclass(frozen=True)
class Stateful(ABC):
    """A rule that remembers the steps of a block."""

    @abstractmethod
    def choosing(self) -> Choosing:
        """The choices in one block. It yields an empty list first."""


Rule = Fixed | Ordered | Threshold | Factor | Stateful


def schedule(masks: int, steps: int) -> list[int]:
    """Section 1: an even split, the first steps taking one more each while a remainder lasts."""
    return [masks // steps + (step < masks % steps) for step in range(steps)]


def ranked(confidence: Tensor, candidates: Tensor) -> list[int]:
    """The candidate positions, most confident first."""
    if confidence[candidates].isnan().any():
        raise ValueError("a candidate has no logits")
    order = confidence.where(candidates, -torch.inf).argsort(descending=True, stable=True)
    return order[: int(candidates.sum())].tolist()


def take_threshold(confidence: Tensor, ranks: Sequence[int], value: float) -> list[int]:
    """The best, and all others not below the threshold."""
    return [position for rank, position in enumerate(ranks) if rank == 0 or confidence[position] >= value]


def take_factor(confidence: Tensor, ranks: Sequence[int], value: float) -> list[int]:
    """The leading ranks that pass; if only the very last one fails, it goes along (the original's loop index)."""
    passed = 1
    while passed < len(ranks) and confidence[ranks[passed]] >= 1 - value / (passed + 2):
        passed += 1
    return list(ranks[: len(ranks) if passed == len(ranks) - 1 else passed])


class Cut(list[int]):
    """Positions to transfer, and where the next pass ends."""

    def __init__(self, positions: Sequence[int], tail: int | None) -> None:
        super().__init__(positions)
        self.tail = tail


def block_windows(canvas: Canvas, length: int) -> list[tuple[int, int]]:
    """Start and end of the blocks of a response in which there is a token to be found."""
    starts = range(canvas.prompt_length, canvas.length, length)
    windows = [(start, min(start + length, canvas.length)) for start in starts]
    return [(start, stop) for start, stop in windows if canvas.noisy[start:stop].any()]


def block_steps(canvas: Canvas, windows: Sequence[tuple[int, int]], steps: int | None) -> list[int]:
    """Steps of each block: one a token; or a given number, shared evenly, on a canvas with holes in proportion.

    In proportion: a step each, and of the others as many up to the end of a block as its share of the tokens up to
    there, rounded down.
    """
    found = [int(canvas.noisy[start:stop].sum()) for start, stop in windows]
    if steps is None:
        return found
    if not canvas.given:
        return [steps // len(windows)] * len(windows)
    shares = [(steps - len(windows)) * sum(found[:count]) // sum(found) for count in range(len(windows) + 1)]
    return [1 + shares[number + 1] - shares[number] for number in range(len(windows))]


class BlockSampler:
    """LLaDA: blocks from left to right, those without a token to be found left out.

    A block ends once it is complete. With `run_out`, a schedule of more steps than masks still runs to its end.
    """

    def __init__(self, canvas: Canvas, block_length: int, rule: Rule, run_out: bool = True) -> None:
        self.canvas, self.rule = canvas, rule
        self.run_out = run_out and isinstance(rule, Fixed | Ordered)
        self.windows = block_windows(canvas, block_length)
        self.steps = block_steps(canvas, self.windows, getattr(rule, "steps", None))
        self.step = self.block_step = self.index = 0
        self.tail: int | None = None  # where the next pass ends, if not at the canvas' end
        self._start_block()

    @property
    def done(self) -> bool:
        """Whether all blocks are complete."""
        return self.index == len(self.windows)

    @property
    def start(self) -> int:
        """The current block's first position."""
        return self.windows[self.index][0]

    @property
    def stop(self) -> int:
        """The position after the current block."""
        return self.windows[self.index][1]

    def upcoming(self) -> list[int]:
        """`Ordered` only: what this step will transfer, in order."""
        if not isinstance(self.rule, Ordered):
            raise TypeError("only an ordered rule knows its positions in advance")
        taken = sum(self.counts[: self.block_step])
        return list(self.rule.order[self.index][taken : taken + self.counts[self.block_step]])

    def commit(self, logits: Tensor) -> None:
        """Transfers this step's positions of the current block and moves on."""
        chosen = self._chosen(logits)
        self.canvas.transfer(chosen, logits)
        tail = chosen.tail if isinstance(chosen, Cut) else None
        self.tail = None if tail is None or self.canvas.fixed[tail:].any() else tail  # what is given is not left out
        self.step += 1
        self.block_step += 1
        complete = not (self.canvas.noisy & self.canvas.span(self.start, self.stop)).any()
        # A step that may not transfer its share leaves some to steps after the last.
        if complete and (not self.run_out or self.block_step >= len(self.counts)):
            self.index += 1
            self.block_step = 0
            self._start_block()

    def _start_block(self) -> None:
        self.counts: list[int] = []
        if isinstance(self.rule, Stateful):
            self.choosing = self.rule.choosing()
            next(self.choosing)
        if isinstance(self.rule, Fixed | Ordered) and not self.done:
            masks = int((self.canvas.noisy & self.canvas.span(self.start, self.stop)).sum())
            self.counts = schedule(masks, self.steps[self.index])

    def _chosen(self, logits: Tensor) -> list[int]:
        if isinstance(self.rule, Ordered):
            return self.upcoming()
        confidence = logits.softmax(-1).amax(-1)
        candidates = self.canvas.candidates & self.canvas.span(0, self.stop if self.tail is None else self.tail)
        ranks = ranked(confidence, candidates)
        match self.rule:
            case Fixed():
                last = self.block_step >= len(self.counts) - 1
                return ranks if last else ranks[: self.counts[self.block_step]]
            case Threshold(value):
                return take_threshold(confidence, ranks, value)
            case Factor(value):
                return take_factor(confidence, ranks, value)
            case Stateful():
                return self.choosing.send((confidence, candidates.nonzero()[:, 0].tolist()))


def timesteps(steps: int, eps: float) -> Tensor:
    """Section 6: the float32 time grid from 1 down to eps."""
    return torch.linspace(1, eps, steps + 1)


def share(masks: int, times: Tensor, step: int) -> int:
    """Section 6: how many of `masks` a step transfers, in float32 arithmetic, truncated."""
    return int(torch.tensor(masks, dtype=torch.float32) * (1 - times[step + 1] / times[step]))


def dream_confidence(logits: Tensor, alg: str) -> Tensor:
    """Section 6: the ranking value of each position under Dream's algorithms."""
    p = logits.softmax(-1)
    if alg == "entropy":
        return (p * (p + 1e-10).log()).sum(-1)
    best = p.topk(2, -1).values
    return best[:, 0] - best[:, 1] if alg == "topk_margin" else best[:, 0]


class DreamSampler:
    """Section 6: the whole canvas at once, a share of the masks that follows the time grid."""

    def __init__(self, canvas: Canvas, alg: str, steps: int, eps: float = 1e-3) -> None:
        if alg not in ("maskgit_plus", "topk_margin", "entropy"):
            raise ValueError(f"unknown Dream algorithm {alg!r}")
        self.canvas, self.alg, self.steps = canvas, alg, steps
        self.times = timesteps(steps, eps)
        self.step = 0

    @property
    def done(self) -> bool:
        """Whether all steps were run, and as many more as there are positions that none could reach."""
        return self.step >= self.steps and not self.canvas.noisy.any()

    def commit(self, logits: Tensor) -> None:
        """Transfers this step's share; the last step takes all that is left."""
        masks = int(self.canvas.noisy.sum())
        count = masks if self.step >= self.steps - 1 else share(masks, self.times, self.step)
        self.canvas.transfer(ranked(dream_confidence(logits, self.alg), self.canvas.candidates)[:count], logits)
        self.step += 1


class DreamThreshold:
    """Section 2.6: a budget per step; what the threshold holds back joins the next step's budget."""

    def __init__(self, canvas: Canvas, threshold: float, steps: int) -> None:
        self.canvas, self.threshold, self.steps = canvas, threshold, steps
        self.budget = int(canvas.noisy.sum()) // steps
        self.leftover = self.step = 0

    @property
    def done(self) -> bool:
        """Whether all steps, appended ones included, were run."""
        return self.step == self.steps

    def commit(self, logits: Tensor) -> None:
        """Transfers the considered candidates that pass; a scheduled last step with a remainder appends another."""
        confidence = logits.softmax(-1).amax(-1)
        considered = self.budget + self.leftover
        chosen = take_threshold(confidence, ranked(confidence, self.canvas.candidates)[:considered], self.threshold)
        self.canvas.transfer(chosen, logits)
        self.leftover = considered - len(chosen)
        self.step += 1
        if self.step == self.steps and self.leftover:
            self.steps += 1
            self.budget = 0
