"""Decoding by masked diffusion (LLaDA, Dream): blocks, steps, and the positions that each step transfers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.policies.base import IdlePasses
from remask.remasking import select
from remask.remasking.rules import BlockStart, Step, check_progress, scheduled
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.blocks import Blocks, blocks_for
from remask.sampling.decoder import Confidence, FixedCanvas, Positions, Tokens, Transfers, Uncorrected, moved
from remask.sampling.resolved_rule import Rule, resolve
from remask.sampling.rows import Basis, RowGroup
from remask.sampling.schedule import TimeSchedule


@dataclass(frozen=True, slots=True)
class MaskedDecoding(FixedCanvas):
    """Masked diffusion of one request (LLaDA, Dream): the response starts as masks, each of which is filled once.

    With a `template` its holes do. Fixed tokens on either side are seen from the first step on.
    """

    prompt: Sequence[int]
    params: SamplingParams
    rule: Rule
    blocks: Blocks
    mask_id: int
    seed: int
    template: Template | None = None

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        defaults: SamplingDefaults,
        mask_id: int,
        seed: int,
        *,
        blockwise: bool,
        template: Template | None = None,
        growing: bool = False,
    ) -> "MaskedDecoding":
        """Return the decoding on a model whose family has these `defaults`.

        `blockwise` is that trait of the cache policy. With `growing`, blocks are those of a canvas that grows. Raises
        `ConfigError` where parameters contradict each other or cannot be met.
        """
        blocks = blocks_for(params, template, growing=growing)
        decoding = cls(prompt, params, resolve(params, defaults, blockwise), blocks, mask_id, seed, template)
        canvas = decoding.canvas()
        decoding.decoder(canvas, "all")  # checks parameters against the canvas, and begins the first block
        masks = np.add.reduceat(canvas.noisy, [block.start for block in decoding.block_ranges], dtype=np.int64)
        for share in sorted(set(zip(masks.tolist(), blocks.steps, strict=True))):
            decoding.rule.remasking.begin(BlockStart(*share, params))
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
    def block_ranges(self) -> list[range]:
        """Blocks from the end of the prompt on that hold positions to be filled."""
        return [moved(block, len(self.prompt)) for block in self.blocks.ranges]

    @property
    def total_steps(self) -> int:
        """Steps of all blocks; one per position where no schedule is followed."""
        return self._masks if self.unscheduled else self.blocks.total_steps

    @property
    def scheduled_steps(self) -> int | None:
        """Steps of all blocks; None where no schedule is followed."""
        return None if self.unscheduled else self.total_steps

    def passes(self, *, skips: bool) -> int:
        """Return the number of steps, or of positions where only steps that transfer something are run."""
        return min(self.total_steps, self._masks) if skips else self.total_steps

    @property
    def _masks(self) -> int:
        return self.params.max_tokens if self.template is None else self.template.open_places

    @property
    def unscheduled(self) -> bool:
        """Whether a threshold, a factor or the rule itself decides how many positions a step transfers."""
        by_value = self.params.threshold is not None or self.params.factor is not None
        return by_value or self.rule.remasking.counts == "rule"

    @property
    def ordered(self) -> bool:
        """Whether the request gives an order, or one is drawn when it begins."""
        return self.rule.remasking.order is not None

    def ends_within(self, *, stop_written: bool) -> bool:  # noqa: ARG002
        """True: settled tokens never change, so a stop token with nothing noisy before it ends the response at once."""
        return True

    def canvas(self) -> Canvas:
        """Return a canvas of the prompt and masks."""
        return Canvas.masked(self.prompt, self.params.max_tokens, self.mask_id, self.template)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "MaskedDecoder":
        """Return a decoder at the first step."""
        return MaskedDecoder(self.params, self.rule, self.blocks, canvas, self.seed, idle)


class MaskedDecoder(Uncorrected):
    """The decoding of one request in progress. It reads the canvas and never writes to it.

    `block` holds the canvas positions of the current block. The first one is block `first`, which begins with `step`.
    `idle` says which scheduled steps are run although they transfer nothing: "skipped" ones are counted as steps, but
    no pass is run; "within_block" ends a block when it is complete; "all" runs the whole schedule.
    """

    writes_once = True

    def __init__(
        self,
        params: SamplingParams,
        rule: Rule,
        blocks: Blocks,
        canvas: Canvas,
        seed: int,
        idle: IdlePasses,
        *,
        first: int = 0,
        step: int = 0,
    ) -> None:
        self.params, self.rule, self.blocks, self.canvas, self.seed = params, rule, blocks, canvas, seed
        self.idle = idle
        self.step = self.first_step = step
        self.block_step = 0
        self.first = self.block_index = first
        by_value = params.threshold is not None or params.factor is not None
        self._by_value = by_value and rule.remasking.counts != "rule"
        self._skips = idle == "skipped" and rule.remasking.counts == "schedule" and not self._by_value
        self._orders = self._checked_orders()
        basis: Basis = "filtered" if rule.remasking.filtered else "logits"
        temperature = 0.0 if params.greedy else params.temperature
        self._reading = (rule.remasking.measure, basis, temperature, params.top_k, params.top_p)
        self._begin_block()
        if self._skips:
            self._skip_idle()

    @property
    def sees(self) -> None:
        """None: attention is fully bidirectional."""
        return

    @property
    def finished(self) -> bool:
        """Whether every block is done."""
        return self.block_index == len(self.blocks.ranges)

    @property
    def order(self) -> Positions | None:
        """The positions that this step transfers, in order, where the rule knows them before the pass; else None."""
        if self.rule.remasking.order is None:
            return None
        order = self._orders[self.block_index]
        return order[self.canvas.noisy[order]][: self._scheduled()]

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. Rules with a state of their own must be asked."""
        if self._by_value:
            threshold = self.params.threshold
            return select.Ranked(1, factor=self.params.factor) if threshold is None else select.Ranked.above(threshold)
        if self._choose is scheduled:
            return select.Ranked(self._scheduled())
        if not self.rule.remasking.blind:
            return None
        candidates = self.block.start + self.canvas.noisy[self.block.start : self.block.stop].nonzero()[0]
        return self.choose(candidates, candidates, np.zeros(len(candidates), dtype=np.float32))

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: by the rule's measure."""
        return RowGroup(rows, *self._reading, self.seed, self.step, positions)

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:  # noqa: ARG002
        """Return which of the noisy `positions` of the block are transferred now, ascending."""
        if not len(positions):
            return positions
        if self._by_value and self.params.threshold is not None:
            return positions[select.above(confidence, self.params.threshold)]
        if self._by_value and self.params.factor is not None:
            return positions[select.by_factor(confidence, self.params.factor)]
        if self._choose is scheduled:
            return positions[select.top(confidence, self._scheduled())]
        step = Step(
            positions=positions,
            confidence=confidence,
            number=self.block_step,
            count=self._scheduled(),
            share=None if self._times is None else self._times.share(self.block_step),
            order=self.order,
            draw=self._draw,
        )
        return positions[check_progress(self.rule.remasking, self._choose(step), step, self._steps)]

    def final(self, written: Positions) -> Positions:
        """Return `written`: what is transferred is final."""
        return written

    def advance(self) -> None:
        """Go on to the next step that is run. The transfers of this one are on the canvas."""
        self._advance()
        if self._skips:
            self._skip_idle()

    def _advance(self, steps: int = 1) -> None:
        self.step += steps
        self.block_step += steps
        # A block whose first pass committed less than its share takes as many steps more as it needs.
        if self._masks():
            return
        unscheduled = self._by_value or self.rule.remasking.counts == "rule"
        if unscheduled or self.idle == "within_block" or self.block_step >= self._steps:
            self.block_index += 1
            if not self.finished:
                self._begin_block()

    def _begin_block(self) -> None:
        self.block = self._block(self.block_index)
        self._steps = self.blocks.steps[self.block_index]
        self._times = None if self.rule.eps is None else TimeSchedule(self._steps, self.rule.eps)
        self.block_step = 0
        masks = self._masks()
        self._share, self._rest = divmod(masks, self._steps)  # as `even_count`
        self.cut = None
        begun = BlockStart(masks, self._steps, self.params, self._leave_out)
        self._choose = self.rule.remasking.begin(begun)

    def _leave_out(self, tail: int | None) -> None:
        if tail is None or (self.canvas.settled[tail:] == -1).any():  # what is fixed is not left out
            self.cut = None
        elif self.cut is None:  # kept as long as a tail is left out, because a new array would be packed again
            self.cut = np.full(len(self.canvas), tail, dtype=np.int64)

    def _block(self, index: int) -> range:
        return moved(self.blocks.ranges[index], self.canvas.prompt)

    def _masks(self) -> int:
        # Of so few flags bytes are counted in half the time that NumPy takes.
        return self.canvas.noisy[self.block.start : self.block.stop].tobytes().count(1)

    def _skip_idle(self) -> None:
        """Go to the next step that may transfer something, over any number of idle steps at once."""
        while not self.finished and (idle := self._idle_steps()):
            self._advance(idle)

    def _idle_steps(self) -> int:
        """How many steps from this one on transfer nothing; they end with the block where no position is noisy."""
        if self._scheduled():
            return 0
        masks, left = self._masks(), self._steps - self.block_step
        if not masks:
            return max(1, left)
        if self._times is not None:
            return self._times.busy(self.block_step, masks) - self.block_step
        return left - 1  # what the first steps leave over falls to the last one

    def _scheduled(self) -> int:
        if self._times is not None:
            return self._times.count(self.block_step, self._masks())
        if self.block_step >= self._steps - 1:
            return self._masks()
        return self._share + (self.block_step < self._rest)

    def _draw(self, count: int) -> NDArray[np.float32]:
        """Draw `count` uniform numbers that depend on the request's seed and step alone."""
        return np.random.default_rng([self.seed, self.step]).random(count, dtype=np.float32)

    def _drawn_orders(self) -> Sequence[Positions]:
        """Draw an order of every block's positions from the request's seed alone."""
        rng = np.random.default_rng(self.seed)
        blocks = [self._block(index) for index in range(self.blocks.count)]
        return [block.start + rng.permutation(len(block)) for block in blocks]

    def _checked_orders(self) -> Sequence[Positions]:
        if self.params.order is None:
            return self._drawn_orders() if self.rule.remasking.order == "drawn" else ()
        orders = [np.asarray(order, dtype=np.int64) for order in self.params.order]
        for index, order in enumerate(orders):
            block = self._block(index)
            wanted = block.start + np.flatnonzero(self.canvas.noisy[block.start : block.stop])
            if sorted(order.tolist()) != wanted.tolist():
                fixed = "" if len(wanted) == len(block) else " that is to be filled"
                raise ConfigError(
                    f"order: list {index} must hold each canvas position from {block.start} to {block.stop - 1}"
                    f"{fixed} once, got {order.tolist()}"
                )
        return orders
