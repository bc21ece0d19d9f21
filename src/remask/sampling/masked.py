"""Decoding by masked diffusion (LLaDA, Dream): blocks, steps, and the positions that each step transfers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from remask.denoising import select
from remask.denoising.rules import REMASKING, RULES, BlockFacts, Remasking, choose_by_schedule, names_on
from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.plan.spans import Mask
from remask.policies.base import IdlePasses
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.blocks import Blocks, LinearSchedule, TimeSchedule, blocks_for
from remask.sampling.decoder import PLAIN, Decoding, Positions, Predictions, RuleDecoder, Transfers, shift_range

EPS = 1e-3  # end of Dream's time schedule, as published


@dataclass(frozen=True, slots=True)
class Rule:
    """How the noisy positions of one request are scored and chosen.

    Attributes:
        remasking: the remasking rule.
        eps: end of Dream's time schedule, if that decides how many positions a step transfers; else None.
        linear: whether A2D's schedule decides how many positions a step transfers.
    """

    remasking: Remasking
    eps: float | None
    linear: bool = False


def resolve_rule(params: SamplingParams, defaults: SamplingDefaults, blockwise: bool = False) -> Rule:
    """Return the rule of one request on a masked model whose family has these `defaults`.

    `blockwise` is the cache policy's `Schedule.blockwise`. Raises `ConfigError` if parameters contradict each other.
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
    timed_by_family = rule.timed == "by_family" and (defaults.time_schedule or params.remasking.eps is not None)
    timed = rule.timed == "always" or timed_by_family
    if params.remasking.eps is not None and not timed:
        raise ConfigError(f"remasking.eps shapes Dream's time schedule; remasking {rule.name!r} does not use one")
    eps = EPS if params.remasking.eps is None else params.remasking.eps
    if rule.blockwise is not None and blockwise:
        rule, timed = RULES.get(rule.blockwise), False
    return Rule(rule, eps if timed else None, linear=defaults.schedule == "linear")


@dataclass(frozen=True, slots=True)
class MaskedDecoding(Decoding):
    """Masked diffusion of one request (LLaDA, Dream): the response starts as masks, each of which is filled once.

    With a `template` only its holes start as masks. Its fixed tokens are seen from the first step on.
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

        `blockwise` is the cache policy's `Schedule.blockwise`. Raises `ConfigError` if parameters contradict each other
        or cannot be met.
        """
        rule = resolve_rule(params, defaults, blockwise)
        blocks = blocks_for(params, template, growing=cls.growing, ragged=rule.linear)
        decoding = cls(prompt, seed, params, rule, blocks, mask_id, template)
        noisy = Canvas.masked(prompt, params.max_tokens, mask_id, template).noisy
        decoding._check_order(noisy)
        mask_counts = np.add.reduceat(noisy, [block.start for block in decoding.block_ranges], dtype=np.int64)
        for mask_count, steps in sorted(set(zip(mask_counts.tolist(), blocks.steps, strict=True))):
            rule.remasking.begin(BlockFacts(mask_count, steps, params.knobs))  # raises ConfigError if it does not fit
        return decoding

    def _check_order(self, noisy: Mask) -> None:
        """Raise `ConfigError` unless the request's order has every `noisy` [T] position of each block once."""
        for index, (order, block) in enumerate(zip(self.params.remasking.order or (), self.block_ranges, strict=False)):
            positions = block.start + np.flatnonzero(noisy[block.start : block.stop])
            if sorted(order) != positions.tolist():
                restriction = "" if len(positions) == len(block) else " that is to be filled"
                raise ConfigError(
                    f"order: list {index} must hold each canvas position from {block.start} to {block.stop - 1}"
                    f"{restriction} once, got {list(order)}"
                )

    @property
    def length(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def block_length(self) -> int:
        return self.blocks.length

    @property
    def block_ranges(self) -> list[range]:
        """Canvas positions of the blocks that hold positions to be filled."""
        return [shift_range(block, len(self.prompt)) for block in self.blocks.ranges]

    @property
    def total_steps(self) -> int:
        """Steps of all blocks; one per position without a schedule."""
        return self._mask_count if self.has_no_schedule else self.blocks.total_steps

    @property
    def scheduled_steps(self) -> int | None:
        return None if self.has_no_schedule else self.total_steps

    def max_passes(self, *, skips: bool) -> int:
        """Return the number of steps; with `skips` at most one for each position to be filled."""
        return min(self.total_steps, self._mask_count) if skips else self.total_steps

    @property
    def _mask_count(self) -> int:
        return self.params.max_tokens if self.template is None else self.template.open_places

    @property
    def has_no_schedule(self) -> bool:
        """Whether a threshold, a factor or the rule decides how many positions a step transfers, and no schedule."""
        return self.params.uses_threshold or self.rule.remasking.counts == "rule"

    @property
    def ordered(self) -> bool:
        """Whether the request has an order, or one is drawn when it begins."""
        return self.rule.remasking.order is not None

    def may_stop_within_block(self, *, stop_written: bool) -> bool:  # noqa: ARG002
        """True: as tokens never change, a stop token without noisy positions before it ends the response at once."""
        return True

    def canvas(self) -> Canvas:
        return Canvas.masked(self.prompt, self.params.max_tokens, self.mask_id, self.template)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "MaskedDecoder":
        return MaskedDecoder(self, canvas, idle)


class MaskedDecoder(RuleDecoder):
    """The decoding of one request in progress, from the block `first_block` on, whose first step is `step`.

    `idle` says which scheduled steps run even if they transfer nothing: "skipped" runs none of them, though they count;
    "within_block" runs them until the block is complete; "all" runs the whole schedule.
    """

    def __init__(
        self, decoding: MaskedDecoding, canvas: Canvas, idle: IdlePasses, *, first_block: int = 0, step: int = 0
    ) -> None:
        rule = decoding.rule.remasking
        params = decoding.params
        super().__init__(params, rule, "filtered" if rule.filtered else "logits", canvas, decoding.seed, step)
        self.blocks = decoding.blocks
        self.idle = idle
        self._eps, self._is_linear = decoding.rule.eps, decoding.rule.linear
        self.first_block = first_block
        self.block_index = first_block
        self._uses_threshold = params.uses_threshold and rule.counts != "rule"
        self._skips = idle == "skipped" and rule.counts == "schedule" and not self._uses_threshold
        if params.remasking.order is not None:
            self._orders: Sequence[Positions] = [np.asarray(order, dtype=np.int64) for order in params.remasking.order]
        else:
            self._orders = self._draw_orders() if rule.order == "drawn" else ()
        self._begin_block()
        self._prepare_step()

    @property
    def finished(self) -> bool:
        return self.block_index == len(self.blocks.ranges)

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. None for rules with a state."""
        if self._uses_threshold:
            threshold = self.params.threshold
            if threshold is None:
                return select.RankRule(1, factor=self.params.remasking.factor)
            return select.RankRule.above(threshold)
        if self._choose is choose_by_schedule:
            return select.RankRule(self._scheduled_count())
        return self._blind_choice()

    def choose(self, predictions: Predictions) -> Positions:
        """See `Decoder`: the positions that threshold or factor, the schedule or the rule select. They may be none."""
        positions, confidence = predictions.positions, predictions.confidence
        if not len(positions):
            return positions
        if self._uses_threshold and self.params.threshold is not None:
            return positions[select.above(confidence, self.params.threshold)]
        if self._uses_threshold and self.params.remasking.factor is not None:
            return positions[select.by_factor(confidence, self.params.remasking.factor)]
        if self._choose is choose_by_schedule:
            return positions[select.top(confidence, self._scheduled_count())]
        share = None if self._schedule is None else self._schedule.share(self.block_step)
        return positions[self._apply_rule(positions, confidence, self._scheduled_count(), share)]

    def advance(self) -> None:
        self._advance_steps()
        if self._skips or self._rule.order is not None:
            self._prepare_step()

    def _prepare_step(self) -> None:
        """Skip idle steps if they run no pass, and put the step's order into the context if the rule has one."""
        if self._skips:
            self._skip_idle()
        if self._rule.order is not None and not self.finished:
            order = self._orders[self.block_index]
            noisy = order[self.canvas.noisy[order]]
            self.context = replace(self.context, order=noisy[: self._scheduled_count()])

    def _advance_steps(self, steps: int = 1) -> None:
        """Count `steps` as done, and begin the next block if that ends the current one."""
        self.step += steps
        self.block_step += steps
        # A block whose first pass transferred less than its share takes as many more steps as it needs.
        if self._count_masks():
            return
        has_no_schedule = self._uses_threshold or self._rule.counts == "rule"
        if has_no_schedule or self.idle == "within_block" or self.block_step >= self._steps:
            self.block_index += 1
            if not self.finished:
                self._begin_block()

    def _begin_block(self) -> None:
        """Make the block at `block_index` the current one, at the first step of its schedule and of its rule."""
        self.block = shift_range(self.blocks.ranges[self.block_index], self.canvas.prompt)
        self._steps = self.blocks.steps[self.block_index]
        self._schedule = self._make_schedule()
        self.block_step = 0
        mask_count = self._count_masks()
        self._even_share, self._remainder = divmod(mask_count, self._steps)  # for `_scheduled_count`
        self.context = PLAIN
        self._choose = self._rule.begin(BlockFacts(mask_count, self._steps, self.params.knobs, self._leave_out))

    def _make_schedule(self) -> TimeSchedule | LinearSchedule | None:
        """The schedule of the block's steps; None if they share the positions evenly."""
        if self._eps is not None:
            return TimeSchedule(self._steps, self._eps)
        return LinearSchedule(self._steps) if self._is_linear else None

    def _leave_out(self, tail: int | None) -> None:
        """Leave the positions from `tail` on out of the next passes; none if `tail` is None or one is fixed."""
        if tail is None or (self.canvas.settled[tail:] == -1).any():
            self.context = replace(self.context, cut=None)
        elif self.context.cut is None:  # else the array stays the same, as a new one would be packed again
            self.context = replace(self.context, cut=np.full(len(self.canvas), tail, dtype=np.int64))

    def _skip_idle(self) -> None:
        """Go to the next step that may transfer something. Skips any number of idle steps at once."""
        while not self.finished and (idle := self._idle_steps()):
            self._advance_steps(idle)

    def _idle_steps(self) -> int:
        """Return how many steps from this one on are known to transfer nothing, up to the end of the block."""
        if self._scheduled_count():
            return 0
        mask_count = self._count_masks()
        steps_left = self._steps - self.block_step
        if not mask_count:
            return max(1, steps_left)
        if self._schedule is not None:
            return self._schedule.next_busy_step(self.block_step, mask_count) - self.block_step
        return steps_left - 1  # the last step transfers what the others leave

    def _scheduled_count(self) -> int:
        """Return how many positions the schedule transfers in this step."""
        if self._schedule is not None:
            return self._schedule.count(self.block_step, self._count_masks())
        if self.block_step >= self._steps - 1:
            return self._count_masks()
        # `even_count` without its division, as this runs in every pass.
        return self._even_share + int(self.block_step < self._remainder)

    def _draw_orders(self) -> Sequence[Positions]:
        """Draw an order of every block's positions from the request's seed alone."""
        rng = np.random.default_rng(self._seed)
        blocks = [shift_range(block, self.canvas.prompt) for block in self.blocks.ranges]
        return [block.start + rng.permutation(len(block)) for block in blocks]
