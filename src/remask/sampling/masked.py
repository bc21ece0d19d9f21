"""Denoising of one masked canvas: blocks, steps, and which candidates are transferred."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.core.canvas import Canvas
from remask.core.sampling import SamplingParams
from remask.errors import ConfigError
from remask.policies.base import IdlePasses
from remask.sampling import select
from remask.sampling.blocks import Blocks, even_blocks
from remask.sampling.decoder import Confidence, Positions, Tokens, Uncorrected
from remask.sampling.rules import Rule, resolve
from remask.sampling.schedule import TimeSchedule, even_counts
from remask.sampling.score import RowGroup, step_seed
from remask.sampling.slowfast import SlowFast


@dataclass(frozen=True, slots=True)
class MaskedDecoding:
    """Masked diffusion of one request (LLaDA, Dream): the response starts as masks, each of which is filled once."""

    prompt: Sequence[int]
    params: SamplingParams
    rule: Rule
    blocks: Blocks
    mask_id: int
    seed: int

    @classmethod
    def of(
        cls, prompt: Sequence[int], params: SamplingParams, family: str, mask_id: int, seed: int, *, blockwise: bool
    ) -> "MaskedDecoding":
        """The decoding on a model of `family`; `blockwise` as the cache policy has it.

        Raises `ConfigError` where parameters contradict each other or cannot be met.
        """
        blocks = even_blocks(params)
        decoding = cls(prompt, params, resolve(params, family, blockwise), blocks, mask_id, seed)
        decoding.decoder(decoding.canvas(), "all")  # checks what depends on the canvas
        return decoding

    @property
    def length(self) -> int:
        """Prompt and response."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def block(self) -> int:
        """Positions per block."""
        return self.blocks.length

    @property
    def ordered(self) -> bool:
        """Whether an order is given or drawn beforehand."""
        return self.rule.ordered

    @property
    def whole_blocks(self) -> bool:
        """A stop token ends the response as soon as nothing before it is open."""
        return False

    def canvas(self) -> Canvas:
        """The prompt and masks."""
        return Canvas.masked(self.prompt, self.params.max_tokens, self.mask_id)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "MaskedDecoder":
        """A decoder at the first step."""
        return MaskedDecoder(self.params, self.rule, self.blocks, canvas, self.seed, idle)


class MaskedDecoder(Uncorrected):
    """One request's place in its decoding. It reads the canvas and never writes to it.

    `idle` says which scheduled steps are run although they transfer nothing: "skipped" ones are counted as steps, but
    no pass is run; "within_block" ends a block when it is complete; "all" runs the whole schedule.
    """

    def __init__(
        self,
        params: SamplingParams,
        rule: Rule,
        blocks: Blocks,
        canvas: Canvas,
        seed: int,
        idle: IdlePasses,
    ) -> None:
        self.params, self.rule, self.blocks, self.canvas, self.seed = params, rule, blocks, canvas, seed
        self.idle = idle
        self.step = 0
        self.block_step = 0
        self.block_index = 0
        self._dynamic = rule.remasking == "slowfast" or (
            rule.remasking != "confidence_threshold" and (params.threshold is not None or params.factor is not None)
        )
        self._times = TimeSchedule(blocks.steps, rule.eps) if rule.eps is not None else None
        self._orders = self._checked_orders()
        self._begin_block()
        self._skip_idle()

    @property
    def sees(self) -> None:
        """Attention is fully bidirectional."""
        return

    @property
    def finished(self) -> bool:
        """Every block is done."""
        return self.block_index == self.blocks.count

    @property
    def block(self) -> range:
        """Canvas positions of the current block."""
        start = self.canvas.prompt + self.block_index * self.blocks.length
        return range(start, start + self.blocks.length)

    @property
    def order(self) -> Positions | None:
        """The positions that this step transfers, in order, where they are known before the pass."""
        if not self.rule.ordered:
            return None
        order = self._orders[self.block_index]
        return order[self.canvas.noisy[order]][: self._scheduled()]

    def group(self, rows: slice, positions: Positions) -> RowGroup:  # noqa: ARG002
        """By the rule's measure."""
        params = self.params
        return RowGroup(
            rows=rows,
            measure=self.rule.measure,
            basis="filtered" if self.rule.filtered else "logits",
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=step_seed(self.seed, self.step),
        )

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:  # noqa: ARG002
        """Positions to transfer now, ascending, of the noisy ones of the block."""
        if not len(positions):
            return positions
        return positions[self._choose(positions, confidence)]

    def final(self, written: Positions) -> Positions:
        """What is transferred is final."""
        return written

    def advance(self) -> None:
        """The step is over and its transfers are on the canvas."""
        self._advance()
        self._skip_idle()

    def _advance(self) -> None:
        self.step += 1
        self.block_step += 1
        if self._block_over():
            self.block_index += 1
            if not self.finished:
                self._begin_block()

    def _begin_block(self) -> None:
        self.block_step = 0
        masks = self._masks()
        self._counts = even_counts(masks, self.blocks.steps)
        self._left_over = 0
        self._slowfast = None if self.params.slowfast is None else SlowFast(self.params.slowfast)
        self._budget = masks // self.blocks.steps
        self._last_step = self.blocks.steps
        if self.rule.remasking == "confidence_threshold" and masks % self.blocks.steps:
            raise ConfigError(
                f"remasking 'confidence_threshold' shares {masks} masks evenly among "
                f"{self.blocks.steps} steps: use a number of steps that divides them"
            )

    def _masks(self) -> int:
        return int(self.canvas.noisy[self.block.start : self.block.stop].sum())

    def _block_over(self) -> bool:
        # A block whose first pass committed less than its share takes as many steps more as it needs.
        if self._masks():
            return False
        dynamic = self._dynamic or self.rule.remasking == "confidence_threshold"
        return dynamic or self.idle == "within_block" or self.block_step >= self.blocks.steps

    def _skip_idle(self) -> None:
        while self.idle == "skipped" and not self.finished and self._idle():
            self._advance()

    def _idle(self) -> bool:
        """Whether this step is known to transfer nothing before it is run."""
        if self._dynamic or self.rule.remasking in ("confidence_threshold", "origin"):
            return False
        return self._scheduled() == 0

    def _scheduled(self) -> int:
        if self._times is not None:
            return self._times.count(self.block_step, self._masks())
        if self.block_step >= self.blocks.steps - 1:
            return self._masks()
        return int(self._counts[self.block_step])

    def _choose(self, candidates: Positions, confidence: select.Confidence) -> select.Chosen:
        if self.rule.remasking == "confidence_threshold":
            return self._within_budget(confidence)
        if self._slowfast is not None:
            return self._slowfast.choose(candidates, confidence)
        if self.params.threshold is not None:
            return select.above(confidence, self.params.threshold)
        if self.params.factor is not None:
            return select.by_factor(confidence, self.params.factor)
        if self.order is not None:
            return np.flatnonzero(np.isin(candidates, self.order))
        if self.rule.remasking == "origin":
            assert self._times is not None
            return np.flatnonzero(self._draw(len(candidates)) < self._times.share(self.block_step))
        return select.top(confidence, self._scheduled())

    def _within_budget(self, confidence: select.Confidence) -> select.Chosen:
        """Fast-dLLM's rule for Dream: each pass looks at its share of the masks and at what earlier passes left over.

        Where the last scheduled pass leaves some over, one more pass is appended, without a share of its own.
        """
        assert self.params.threshold is not None
        considered = self._budget + self._left_over
        chosen = select.within_budget(confidence, self.params.threshold, considered)
        self._left_over = considered - len(chosen)
        if self.block_step + 1 == self._last_step and self._left_over:
            self._last_step += 1
            self._budget = 0
        return chosen

    def _draw(self, count: int) -> NDArray[np.float32]:
        """Uniform numbers that depend on the request's seed and step alone."""
        return np.random.default_rng([self.seed, self.step]).random(count, dtype=np.float32)

    def _drawn_orders(self) -> Sequence[Positions]:
        """A random order of every block's positions, from the request's seed alone."""
        rng = np.random.default_rng(self.seed)
        starts = range(self.canvas.prompt, self.canvas.prompt + self.params.max_tokens, self.blocks.length)
        return [start + rng.permutation(self.blocks.length) for start in starts]

    def _checked_orders(self) -> Sequence[Positions]:
        if self.params.order is None:
            return self._drawn_orders() if self.rule.ordered else ()
        orders = [np.asarray(order, dtype=np.int64) for order in self.params.order]
        for index, order in enumerate(orders):
            start = self.canvas.prompt + index * self.blocks.length
            if sorted(order.tolist()) != list(range(start, start + self.blocks.length)):
                raise ConfigError(
                    f"order: list {index} must hold each canvas position from {start} to "
                    f"{start + self.blocks.length - 1} once, got {order.tolist()}"
                )
        return orders
