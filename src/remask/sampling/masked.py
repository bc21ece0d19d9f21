"""Decoding by masked diffusion (LLaDA, Dream): blocks, steps, and the positions that each step transfers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from remask.denoising import select
from remask.denoising.rules import REMASKING, RULES, BlockFacts, Remasking, names_on, scheduled
from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.plan.spans import Mask
from remask.policies.base import IdlePasses
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.blocks import Blocks, LinearSchedule, TimeSchedule, blocks_for
from remask.sampling.decoder import PLAIN, Decoding, Positions, Predicted, RuleDecoder, Transfers, moved

EPS = 1e-3  # end of Dream's time schedule, as published


@dataclass(frozen=True, slots=True)
class Rule:
    """How the noisy positions of one request are scored and chosen.

    `eps` is set where Dream's time schedule decides how many positions a step transfers, `linear` where A2D's does.
    """

    remasking: Remasking
    eps: float | None
    linear: bool = False


def resolve(params: SamplingParams, defaults: SamplingDefaults, blockwise: bool = False) -> Rule:
    """Return the rule of one request on a masked model whose family has these defaults.

    `blockwise` is that trait of the cache policy. Raises `ConfigError` where parameters contradict each other.
    """
    rule = RULES.get(params.remasking.rule or defaults.remasking)
    if params.uses_threshold and not rule.thresholds:
        if params.remasking.rule is not None:
            name = "threshold" if params.threshold is not None else "remasking.factor"
            fitting = " or ".join(name for name in names_on("masked") if RULES.get(name).thresholds)
            raise ConfigError(f"{name} compares probabilities: use it with remasking {fitting}, not {rule.name}")
        rule = REMASKING["low_confidence"]
    if params.uses_threshold and params.remasking.eps is not None:
        raise ConfigError(
            "remasking.eps shapes Dream's time schedule, and threshold and remasking.factor use no schedule; set one "
            "of them"
        )
    by_family = rule.timed == "by_family" and (defaults.time_schedule or params.remasking.eps is not None)
    timed = rule.timed == "always" or by_family
    if params.remasking.eps is not None and not timed:
        raise ConfigError(f"remasking.eps shapes Dream's time schedule; remasking {rule.name!r} does not use one")
    linear = defaults.schedule == "linear"
    if rule.blockwise is not None and blockwise:
        return Rule(RULES.get(rule.blockwise), None, linear)
    return Rule(rule, (EPS if params.remasking.eps is None else params.remasking.eps) if timed else None, linear)


@dataclass(frozen=True, slots=True)
class MaskedDecoding(Decoding):
    """Masked diffusion of one request (LLaDA, Dream): the response starts as masks, each of which is filled once.

    With a `template` its holes do. Fixed tokens on either side are seen from the first step on.
    """

    params: SamplingParams
    rule: Rule
    blocks: Blocks
    mask_id: int
    template: Template | None = None

    growing: ClassVar[bool] = False
    """Whether the canvas grows block by block."""

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
    ) -> Self:
        """Return the decoding on a model whose family has these `defaults`.

        `blockwise` is that trait of the cache policy. Raises `ConfigError` where parameters contradict each other or
        cannot be met.
        """
        rule = resolve(params, defaults, blockwise)
        blocks = blocks_for(params, template, growing=cls.growing, ragged=rule.linear)
        decoding = cls(prompt, seed, params, rule, blocks, mask_id, template)
        noisy = Canvas.masked(prompt, params.max_tokens, mask_id, template).noisy
        decoding._check_order(noisy)
        masks = np.add.reduceat(noisy, [block.start for block in decoding.block_ranges], dtype=np.int64)
        for share in sorted(set(zip(masks.tolist(), blocks.steps, strict=True))):
            rule.remasking.begin(BlockFacts(*share, params.knobs))
        return decoding

    def _check_order(self, noisy: Mask) -> None:
        """Raise `ConfigError` where the request's order does not hold what is `noisy` [T] of each block once."""
        for index, (order, block) in enumerate(zip(self.params.remasking.order or (), self.block_ranges, strict=False)):
            wanted = block.start + np.flatnonzero(noisy[block.start : block.stop])
            if sorted(order) != wanted.tolist():
                fixed = "" if len(wanted) == len(block) else " that is to be filled"
                raise ConfigError(
                    f"order: list {index} must hold each canvas position from {block.start} to {block.stop - 1}"
                    f"{fixed} once, got {list(order)}"
                )

    @property
    def length(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def block(self) -> int:
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
        return self.params.uses_threshold or self.rule.remasking.counts == "rule"

    @property
    def ordered(self) -> bool:
        """Whether the request gives an order, or one is drawn when it begins."""
        return self.rule.remasking.order is not None

    def ends_within(self, *, stop_written: bool) -> bool:  # noqa: ARG002
        """True: settled tokens never change, so a stop token with nothing noisy before it ends the response at once."""
        return True

    def canvas(self) -> Canvas:
        return Canvas.masked(self.prompt, self.params.max_tokens, self.mask_id, self.template)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "MaskedDecoder":
        return MaskedDecoder(self, canvas, idle)


class MaskedDecoder(RuleDecoder):
    """The decoding of one request in progress. The first block is block `first`, which begins with `step`.

    `idle` says which scheduled steps are run although they transfer nothing: "skipped" ones are counted as steps, but
    no pass is run; "within_block" ends a block when it is complete; "all" runs the whole schedule.
    """

    def __init__(
        self, decoding: MaskedDecoding, canvas: Canvas, idle: IdlePasses, *, first: int = 0, step: int = 0
    ) -> None:
        rule, params = decoding.rule.remasking, decoding.params
        super().__init__(params, rule, "filtered" if rule.filtered else "logits", canvas, decoding.seed, step)
        self.blocks, self.idle, self._timing = decoding.blocks, idle, decoding.rule
        self.first = self.block_index = first
        self._by_value = params.uses_threshold and rule.counts != "rule"
        self._skips = idle == "skipped" and rule.counts == "schedule" and not self._by_value
        if params.remasking.order is not None:
            self._orders: Sequence[Positions] = [np.asarray(order, dtype=np.int64) for order in params.remasking.order]
        else:
            self._orders = self._drawn_orders() if rule.order == "drawn" else ()
        self._begin_block()
        self._settle_context()

    @property
    def finished(self) -> bool:
        return self.block_index == len(self.blocks.ranges)

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. Rules with a state of their own must be asked."""
        if self._by_value:
            threshold = self.params.threshold
            return (
                select.RankRule(1, factor=self.params.remasking.factor)
                if threshold is None
                else select.RankRule.above(threshold)
            )
        if self._choose is scheduled:
            return select.RankRule(self._scheduled())
        return self._blindly()

    def choose(self, predictions: Predicted) -> Positions:
        positions, confidence = predictions.positions, predictions.confidence
        if not len(positions):
            return positions
        if self._by_value and self.params.threshold is not None:
            return positions[select.above(confidence, self.params.threshold)]
        if self._by_value and self.params.remasking.factor is not None:
            return positions[select.by_factor(confidence, self.params.remasking.factor)]
        if self._choose is scheduled:
            return positions[select.top(confidence, self._scheduled())]
        share = None if self._times is None else self._times.share(self.block_step)
        return positions[self._by_rule(positions, confidence, self._scheduled(), share)]

    def advance(self) -> None:
        self._advance()
        if self._skips or self._rule.order is not None:
            self._settle_context()

    def _settle_context(self) -> None:
        """Go to the next step that is run, and say in which order it transfers, where the rule knows that before."""
        if self._skips:
            self._skip_idle()
        if self._rule.order is not None and not self.finished:
            order = self._orders[self.block_index]
            open_ = order[self.canvas.noisy[order]]
            self.context = replace(self.context, order=open_[: self._scheduled()])

    def _advance(self, steps: int = 1) -> None:
        self.step += steps
        self.block_step += steps
        # A block whose first pass committed less than its share takes as many steps more as it needs.
        if self._masks():
            return
        unscheduled = self._by_value or self._rule.counts == "rule"
        if unscheduled or self.idle == "within_block" or self.block_step >= self._steps:
            self.block_index += 1
            if not self.finished:
                self._begin_block()

    def _begin_block(self) -> None:
        self.block = self._block(self.block_index)
        self._steps = self.blocks.steps[self.block_index]
        self._times = self._schedule()
        self.block_step = 0
        masks = self._masks()
        self._share, self._rest = divmod(masks, self._steps)  # as `even_count`
        self.context = PLAIN
        begun = BlockFacts(masks, self._steps, self.params.knobs, self._leave_out)
        self._choose = self._rule.begin(begun)

    def _schedule(self) -> TimeSchedule | LinearSchedule | None:
        """What says how many positions a step of the block transfers; None: they are shared evenly."""
        if self._timing.eps is not None:
            return TimeSchedule(self._steps, self._timing.eps)
        return LinearSchedule(self._steps) if self._timing.linear else None

    def _leave_out(self, tail: int | None) -> None:
        if tail is None or (self.canvas.settled[tail:] == -1).any():  # what is fixed is not left out
            self.context = replace(self.context, cut=None)
        elif self.context.cut is None:  # kept as long as a tail is left out: a new array would be packed again
            self.context = replace(self.context, cut=np.full(len(self.canvas), tail, dtype=np.int64))

    def _block(self, index: int) -> range:
        return moved(self.blocks.ranges[index], self.canvas.prompt)

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

    def _drawn_orders(self) -> Sequence[Positions]:
        """Draw an order of every block's positions from the request's seed alone."""
        rng = np.random.default_rng(self._seed)
        blocks = [self._block(index) for index in range(self.blocks.count)]
        return [block.start + rng.permutation(len(block)) for block in blocks]
