"""Decoding under a block-causal mask (SDAR, A2D): blocks on a grid, each completed before the next begins."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from remask.denoising import select
from remask.denoising.indel import EditTokens, IndelBlock, Limits, Probabilities, Round, TokenCandidates
from remask.denoising.rules import (
    EDIT_THRESHOLD,
    INDEL_EDIT_THRESHOLD,
    INDEL_STEPS,
    INDEL_THRESHOLD,
    MAX_POST_STEPS,
    MAX_STEPS_PER_BLOCK,
    REMASKING,
    RULES,
    BlockFacts,
    Remasking,
    check_threshold,
    choose_by_schedule,
)
from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.plan.plan import Reach
from remask.policies.base import IdlePasses
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.blocks import LinearSchedule, even_count
from remask.sampling.decoder import (
    Confidence,
    Decoding,
    Outcome,
    Positions,
    Predictions,
    RuleDecoder,
    StepContext,
    Transfers,
    blocks_of,
)
from remask.sampling.device_reads import MostProbable
from remask.sampling.rows import Penalty, RowGroup


@dataclass(frozen=True, slots=True)
class BlockCausalDecoding(Decoding):
    """Block-causal diffusion of one request.

    Blocks are cut at multiples of `block_length`, counted from the start of the canvas, so that the first one may begin
    with the prompt's last tokens, or from the end of the prompt (`SamplingDefaults`). The last one may reach beyond the
    response; its tokens there are not part of the answer. Fixed tokens of a `template` must be before its first hole or
    in the block of that hole.
    """

    params: SamplingParams
    rule: Remasking
    block_length: int = field()  # without a default, which the property of the base would be
    mask_id: int = field()
    defaults: SamplingDefaults
    template: Template | None = None
    edit_tokens: EditTokens | None = None
    max_steps: int = MAX_STEPS_PER_BLOCK

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        defaults: SamplingDefaults,
        block_length: int | None,
        mask_id: int,
        seed: int,
        template: Template | None = None,
        *,
        edit_tokens: EditTokens | None = None,
        routing: int = 1,
        max_steps: int = MAX_STEPS_PER_BLOCK,
    ) -> "BlockCausalDecoding":
        """Return the decoding on a model of a family with these `defaults`, trained with blocks of `block_length`.

        The model may write `edit_tokens`, and chooses experts in blocks of `routing` positions. The request may take at
        most `max_steps` steps.

        Raises `ConfigError` on parameters that contradict each other or cannot be met.
        """
        length = params.block_length or block_length
        if length is None:
            raise ConfigError("block_length is not in the model's config.json: give the one that it was trained with")
        rule = RULES.get(params.remasking.rule or defaults.remasking)
        decoding = cls(prompt, seed, params, rule, length, mask_id, defaults, template, edit_tokens, max_steps)
        decoding._check_params(routing)
        decoding._check_template()
        decoding._check_indel()
        return decoding

    def _check_params(self, routing: int) -> None:
        """Raise `ConfigError` if parameters contradict each other, the rule, or blocks of `routing` positions."""
        params, rule, block_length = self.params, self.rule, self.block_length
        params.check_rule(rule)
        check_threshold(rule, params.threshold)
        if block_length % routing:
            raise ConfigError(
                f"block_length={block_length}: this model chooses experts in blocks of {routing} positions, all rows "
                f"of which are computed together; use a multiple of {routing}"
            )
        if params.remasking.fallback is not None and params.threshold is None:
            raise ConfigError("fallback says what is taken where too few pass the threshold; set threshold, too")
        if params.remasking.fallback is not None and rule.counts != "schedule":
            raise ConfigError(
                f"fallback is for rules that follow the schedule, and remasking {rule.name!r} counts by itself; leave "
                "one of them out"
            )
        if params.blocks.sub_block_length is not None and block_length % params.blocks.sub_block_length:
            raise ConfigError(
                f"sub_block_length={params.blocks.sub_block_length} does not divide the block of {block_length}; "
                "use one that does"
            )
        if params.remasking.eb_threshold is not None and rule.name != "entropy_bounded":
            raise ConfigError("eb_threshold is for remasking 'entropy_bounded': set both, or neither")

    def _check_indel(self) -> None:
        """Raise `ConfigError` if a rule that deletes and inserts does not suit the model or the request."""
        tokens = self.edit_tokens
        params = self.params
        if (tokens is None) != (self.rule.indel is None):
            fitting = ", ".join(name for name, rule in REMASKING.items() if (rule.indel is None) == (tokens is None))
            fact = "writes no tokens that delete and insert" if tokens is None else "deletes and inserts tokens"
            raise ConfigError(f"remasking {self.rule.name!r}: this model {fact} places of a block; use {fitting}")
        if tokens is None or self.rule.indel is None:
            return
        fixed = np.asarray(self.prompt if self.template is None else [*self.prompt, *self.template.tokens])
        edit_tokens = fixed[tokens.matches(fixed)]
        if len(edit_tokens):
            raise ConfigError(
                f"the prompt holds the token {edit_tokens[0]}, by which this model deletes or inserts a place of its "
                f"answer ({tokens.delete} and {tokens.insert}); it has no meaning in a prompt, so leave it out"
            )
        if self.template is not None and (
            self.template.pinned[self.template.holes[0].start :].any() or self.template.unpadded.any()
        ):
            raise ConfigError(
                "canvas: this model deletes and inserts tokens, which would move what is fixed behind a hole; end the "
                "canvas with its hole, and give it no least number of tokens"
            )
        if params.min_tokens:
            raise ConfigError(
                "min_tokens: this model deletes and inserts tokens, so an end token may move to an earlier place; "
                "leave it out"
            )
        if not params.greedy and not self.rule.indel.draws:
            raise ConfigError(
                f"temperature={params.temperature}: remasking {self.rule.name!r} takes the most probable tokens; leave "
                "one of them out"
            )

    def _check_template(self) -> None:
        """Raise `ConfigError` if a fixed part follows the block of a hole, which would never attend to it."""
        if self.template is None:
            return
        pinned = np.flatnonzero(self.template.pinned) + len(self.prompt)
        late_positions = pinned[pinned >= self.block_ranges[0].stop]
        if len(late_positions):
            index = int(late_positions[0]) - len(self.prompt)
            raise ConfigError(
                f"canvas: place {index} of the response is fixed, and its block comes after a block with a hole. A "
                f"block-causal model sees its own block of {self.block_length} positions and what is before it, so "
                "it cannot fill a hole to suit what follows; end the canvas with its hole, or use a masked or uniform "
                "model"
            )

    @property
    def from_prompt(self) -> bool:
        return self.defaults.blocks_from_prompt

    @property
    def length(self) -> int:
        """Prompt and response, rounded up to whole blocks if the family does so."""
        length = len(self.prompt) + self.params.max_tokens
        return -(-length // self.block_length) * self.block_length if self.defaults.whole_blocks else length

    @property
    def block_ranges(self) -> list[range]:
        """Blocks of the grid that hold positions to be denoised."""
        start = len(self.prompt) + (0 if self.template is None else self.template.holes[0].start)
        blocks = blocks_of(self.block_length, start - (start - self.block_offset) % self.block_length, self.length)
        return [range(max(0, block.start), min(block.stop, self.length)) for block in blocks]

    @property
    def total_steps(self) -> int:
        if self.rule.indel is not None:
            return len(self.block_ranges) * self.rule.indel.max_passes(self.block_length, self.limits)
        return len(self.block_ranges) * (self.params.steps_per_block or self.block_length) + self._edit_steps

    @property
    def scheduled_steps(self) -> None:
        """None: a block ends as soon as it is full."""

    def max_passes(self, *, skips: bool) -> int:  # noqa: ARG002
        """Return the number of positions to be filled, one in each step, plus the number of steps that only edit."""
        if self.rule.indel is not None:
            return self.total_steps
        fixed_count = 0 if self.template is None else len(self.template) - self.template.open_places
        return self.length - len(self.prompt) - fixed_count + self._edit_steps

    @property
    def max_post_steps(self) -> int:
        """Steps of a block without masks, at most."""
        if not self.rule.edits:
            return 0
        max_post_steps = self.params.remasking.max_post_steps
        return MAX_POST_STEPS if max_post_steps is None else max_post_steps

    @property
    def limits(self) -> Limits:
        """The parameters of each block under a rule that deletes and inserts."""
        params = self.params
        remasking = params.remasking
        block_steps = max(1, min(MAX_STEPS_PER_BLOCK, self.max_steps // len(self.block_ranges)))
        return Limits(
            threshold=INDEL_THRESHOLD if params.threshold is None else params.threshold,
            edit_threshold=INDEL_EDIT_THRESHOLD if remasking.edit_threshold is None else remasking.edit_threshold,
            max_post_steps=self.max_post_steps,
            steps=params.steps_per_block or INDEL_STEPS,
            max_steps=remasking.max_steps_per_block or block_steps,
        )

    @property
    def _edit_steps(self) -> int:
        """Steps of all blocks without masks, at most."""
        return len(self.block_ranges) * self.max_post_steps

    def may_stop_within_block(self, *, stop_written: bool) -> bool:
        """Whether `early_stop` is set and the last step wrote a stop token, as in LLaDA2's code.

        Without `early_stop` a block always runs to its end, as in SDAR's code.
        """
        return bool(self.params.blocks.early_stop) and stop_written

    def canvas(self) -> Canvas:
        masks = [self.mask_id] * (self.length - len(self.prompt))
        return Canvas(self.prompt, masks, self.params.max_tokens, self.template)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "BlockCausalDecoder":  # noqa: ARG002
        """Return a decoder at the first step. Idle steps of the schedule are never run."""
        if self.rule.indel is not None:
            return IndelDecoder(self, canvas, self.rule.indel)
        return EditingDecoder(self, canvas) if self.rule.edits else BlockCausalDecoder(self, canvas)


class BlockCausalDecoder(RuleDecoder):
    """The decoding of one request in progress."""

    _schedule_step: int  # steps of the block's schedule so far, idle ones included

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas) -> None:
        # Confidences are taken after temperature and before filters, as in JetEngine and in SDAR's sampler for
        # evaluation. SDAR's generate.py takes them after filters, so that with top_k=1 all of them are 1.
        super().__init__(decoding.params, decoding.rule, "tempered", canvas, decoding.seed)
        self._block_length = decoding.block_length
        self._steps = decoding.params.steps_per_block or decoding.block_length
        self._defaults = decoding.defaults
        block_index = (np.arange(len(canvas)) - decoding.block_offset) // self._block_length
        # The end of each row's block: a row attends to its own block and all before it.
        sees: Reach = np.minimum((block_index + 1) * self._block_length + decoding.block_offset, len(canvas))
        self._context = StepContext(sees=sees)
        self._opening_context = StepContext(sees=sees, opens=True)
        self._linear_schedule = LinearSchedule(self._steps) if self._defaults.schedule == "linear" else None
        self._begin_block(decoding.block_ranges[0])
        self._prepare_step()

    @property
    def finished(self) -> bool:
        return self.block.stop == len(self.canvas) and not self._count_masks()

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. None for rules that choose by more than a rank and one threshold."""
        threshold = self.params.threshold if self._rule.counts == "schedule" else None
        if self.params.blocks.sub_block_length is not None or self.params.remasking.fallback == "leftmost":
            return None
        if self._choose is choose_by_schedule:
            if threshold is None:
                return select.RankRule(self._scheduled_count)
            if self._strict:
                return select.RankRule.strictly_above(threshold, self._scheduled_count)
            return select.RankRule.above(threshold)
        return self._blind_choice() if threshold is None else None

    def choose(self, predictions: Predictions) -> Positions:
        positions, confidence = predictions.positions, predictions.confidence
        sub_block_length = self.params.blocks.sub_block_length
        if sub_block_length is not None and len(positions):
            # Sub-blocks are completed from left to right, so the first mask is in the current one.
            finished_count = (positions[0] - self.block.start) // sub_block_length
            stop = self.block.start + (finished_count + 1) * sub_block_length
            count = int((positions < stop).sum())
            positions, confidence = positions[:count], confidence[:count]
        return positions[self._choose_indices(positions, confidence)]

    def advance(self) -> None:
        self.step += 1
        self.block_step += 1
        self._schedule_step += 1
        if self.block.stop < len(self.canvas) and not self._count_masks():
            stop = self.block.stop
            self._begin_block(range(stop, min(stop + self._block_length, len(self.canvas))))
        self._prepare_step()

    def _prepare_step(self) -> None:
        """Go to the next step of the schedule that transfers something, and set its context."""
        if self._linear_schedule is not None and self._follows_schedule:
            self._schedule_step = self._linear_schedule.next_busy_step(self._schedule_step, self._count_masks())
        opens_block = self._defaults.opens_blocks and bool(self.canvas.noisy[self.block.start])
        self.context = self._opening_context if opens_block else self._context

    def _begin_block(self, block: range) -> None:
        """Make `block` the current one, at the first step of its schedule and of its rule."""
        self.block = block
        self.block_step = 0
        self._schedule_step = 0
        self._schedule_total = self._block_length if self._strict else self._count_masks()
        self._choose = self._rule.begin(BlockFacts(self._count_masks(), self._steps, self.params.knobs))

    def _choose_indices(self, positions: Positions, confidence: Confidence) -> select.Chosen:
        """Return the indices of the noisy `positions` that are transferred now."""
        params = self.params
        count = self._scheduled_count
        if params.threshold is not None and self._rule.counts == "schedule":
            passed = np.flatnonzero(confidence > params.threshold if self._strict else confidence >= params.threshold)
            if len(passed) >= count:
                return passed
            if params.remasking.fallback == "leftmost":
                return np.flatnonzero(positions < positions[0] + count)
        return self._apply_rule(positions, confidence, count)

    @property
    def _strict(self) -> bool:
        """Whether a threshold must be exceeded, by at least the number of positions that the schedule transfers."""
        return self._defaults.schedule == "even"

    @property
    def _follows_schedule(self) -> bool:
        """Whether the schedule says how many positions a step transfers at least."""
        return self._rule.counts == "schedule" and (self._strict or self.params.threshold is None)

    @property
    def _scheduled_count(self) -> int:
        """How many positions the schedule transfers in this step.

        The count is 1 from the end of the schedule until the block is complete, and under a threshold that replaces the
        schedule.
        """
        if self._schedule_step >= self._steps or (self._rule.counts == "schedule" and not self._follows_schedule):
            return 1
        if self._linear_schedule is not None:
            return max(1, self._linear_schedule.count(self._schedule_step, self._count_masks()))
        return max(1, even_count(self._schedule_total, self._steps, self._schedule_step))


class EditingDecoder(BlockCausalDecoder):
    """A decoding whose rule edits (LLaDA2.1): tokens of a block are final when the block is done, not before.

    A step fills masks by the rule, and replaces tokens of earlier steps by others more probable than `edit_threshold`.
    A block is done once a step without masks changes nothing, or after `max_post_steps` such steps.
    """

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas) -> None:
        self._mask_flags = canvas.noisy.copy()
        super().__init__(decoding, canvas)
        self._max_post_steps = decoding.max_post_steps
        edit_threshold = decoding.params.remasking.edit_threshold
        self._edit_threshold = EDIT_THRESHOLD if edit_threshold is None else edit_threshold

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: with the request's penalty, if any, on the token to the left within the block."""
        group = super().group(rows, positions)
        size = self.params.remasking.penalty_lambda
        if not size:
            return group
        predecessors = np.where(positions > self.block.start, self.canvas.tokens[positions - 1], Penalty.NONE)
        return replace(group, penalty=Penalty(predecessors, size))

    def choose(self, predictions: Predictions) -> Positions:
        """Return the positions of masks that are filled and of tokens that are replaced now, ascending."""
        positions, tokens = predictions.positions, predictions.tokens
        masks = self._mask_flags[positions]
        edits = ~masks & (predictions.confidence > self._edit_threshold) & (tokens != self.canvas.tokens[positions])
        filled = super().choose(predictions.select(masks)) if masks.any() else positions[:0]
        return np.union1d(filled, positions[edits])

    def outcome(self, positions: Positions) -> Outcome:
        """Record a step. All noisy positions of the block are final if it completes the block, else none."""
        in_block = slice(self.block.start, self.block.stop)
        edits = positions[~self._mask_flags[positions]]
        had_masks = self._mask_flags[in_block].any()
        self._mask_flags[positions] = False
        self._post_steps += int(not self._mask_flags[in_block].any())
        if not (had_masks or len(positions)) or self._post_steps > self._max_post_steps:
            return Outcome(np.flatnonzero(self.canvas.noisy[in_block]) + self.block.start, edits)
        return Outcome(positions[:0], edits)

    def _begin_block(self, block: range) -> None:
        super()._begin_block(block)
        self._post_steps = 0  # steps of the block without masks, the next one included


class IndelDecoder(BlockCausalDecoder):
    """A decoding whose rule deletes and inserts tokens (LLaDA2.2): nothing of a block is final before it is done.

    Tokens that an insertion moves beyond the end of the block are lost, and masks fill it up after deletions, so that
    blocks stay on their grid. Above temperature 0 masks are filled with drawn tokens, but tokens are replaced by the
    most probable ones.
    """

    _indel_block: IndelBlock  # the noisy positions of the block
    _round: Round  # the changes of the last pass
    _edited_positions: Positions

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas, rule: type[IndelBlock]) -> None:
        assert decoding.edit_tokens is not None
        self._edit_tokens = decoding.edit_tokens
        self._limits = decoding.limits
        self._mask_id = decoding.mask_id
        self._indel_rule = rule
        super().__init__(decoding, canvas)

    @property
    def transfers(self) -> None:
        """None: the positions depend on the pass."""

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: greedily, as `StepContext.device_read` has the drawn tokens."""
        top_k, top_p = self.params.top_k, self.params.top_p
        return RowGroup(rows, top_k=top_k, top_p=top_p, seed=self._seed, step=self.step, positions=positions)

    def choose(self, predictions: Predictions) -> Positions:
        """Apply the pass to the block. Returns the positions whose tokens differ after DELETE and INSERT, ascending."""
        indel_block = self._indel_block
        positions = predictions.positions
        assert predictions.numbers is not None
        old_tokens, masks = indel_block.tokens, indel_block.masks
        rng = np.random.default_rng([self._seed, self.step])

        def pick(probabilities: Probabilities) -> int:
            return int(probabilities.argmin() if self.params.greedy else rng.integers(len(probabilities)))

        candidates = TokenCandidates.of(predictions.numbers, drawn=not self.params.greedy)
        self._round = indel_block.choose(candidates, pick)
        has_changed = indel_block.tokens != old_tokens
        self._edited_positions = positions[has_changed & ~masks]
        changed_positions: Positions = positions[has_changed]
        return changed_positions

    def outcome(self, positions: Positions) -> Outcome:
        """See `Decoder`: all noisy positions of the block are final if this step completes it, else none."""
        indel_block = self._indel_block
        first = self.block.stop - len(indel_block.tokens)
        return Outcome(
            final=positions[:0] if indel_block.end_reason is None else np.arange(first, self.block.stop),
            edits=positions[np.isin(positions, self._edited_positions)],
            tokens=indel_block.tokens[positions - first],
            writes=tuple((first + place, token) for place, token in sorted((*self._round.fills, *self._round.edits))),
        )

    def _prepare_step(self) -> None:
        """See the base class. A pass reads as many of the most probable tokens as the block may need."""
        super()._prepare_step()
        params = self.params
        tokens = self._edit_tokens
        temperature = 0.0 if params.greedy else params.temperature
        read = MostProbable(self._indel_block.candidate_count, temperature, (tokens.delete, tokens.insert))
        self.context = replace(self.context, device_read=read)

    def _begin_block(self, block: range) -> None:
        super()._begin_block(block)
        self._indel_block = self._indel_rule(self._count_masks(), self._mask_id, self._edit_tokens, self._limits)
