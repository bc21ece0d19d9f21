"""Decoding under a block-causal mask (SDAR, A2D): blocks on a grid, each completed before the next begins."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from remask.denoising import select
from remask.denoising.indel import EditTokens, IndelBlock, Limits, Round, TokenCandidates
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
    scheduled,
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
    Predicted,
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

    Blocks are cut at multiples of `block` from the start of the canvas, so the first one may begin with the prompt's
    last tokens, or from the end of the prompt (`SamplingDefaults`). The last one may reach beyond the response; tokens
    there are not part of the answer.
    Fixed tokens of a `template` must be before its first hole, or in the block of its last one.
    """

    params: SamplingParams
    rule: Remasking
    block: int = field()  # without a default, which the property of the base would be
    mask_id: int = field()
    defaults: SamplingDefaults
    template: Template | None = None
    edit_tokens: EditTokens | None = None
    most_steps: int = MAX_STEPS_PER_BLOCK

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        defaults: SamplingDefaults,
        block: int | None,
        mask_id: int,
        seed: int,
        template: Template | None = None,
        *,
        edit_tokens: EditTokens | None = None,
        routing: int = 1,
        most_steps: int = MAX_STEPS_PER_BLOCK,
    ) -> "BlockCausalDecoding":
        """Return the decoding on a model of a family with these `defaults`, trained with blocks of `block`.

        The model may write `edit_tokens`, and chooses experts in blocks of `routing` positions. The request may take
        `most_steps`.

        Raises `ConfigError` on parameters that contradict each other or cannot be met.
        """
        length = params.block_length or block
        if length is None:
            raise ConfigError("block_length is not in the model's config.json: give the one that it was trained with")
        rule = RULES.get(params.remasking.rule or defaults.remasking)
        params.check_rule(rule)
        check_threshold(rule, params.threshold)
        if length % routing:
            raise ConfigError(
                f"block_length={length}: this model chooses experts in blocks of {routing} positions, all rows of "
                f"which are computed together; use a multiple of {routing}"
            )
        if params.remasking.fallback is not None and params.threshold is None:
            raise ConfigError("fallback says what is taken where too few pass the threshold; set threshold, too")
        if params.remasking.fallback is not None and rule.counts != "schedule":
            raise ConfigError(
                f"fallback is for rules that follow the schedule, and remasking {rule.name!r} counts by itself; leave "
                "one of them out"
            )
        if params.blocks.sub_block_length is not None and length % params.blocks.sub_block_length:
            raise ConfigError(
                f"sub_block_length={params.blocks.sub_block_length} is no divisor of the block of {length}; use one "
                "that is"
            )
        if params.remasking.eb_threshold is not None and rule.name != "entropy_bounded":
            raise ConfigError("eb_threshold is for remasking 'entropy_bounded': set both, or neither")
        decoding = cls(prompt, seed, params, rule, length, mask_id, defaults, template, edit_tokens, most_steps)
        decoding._check_template()
        decoding._check_indel()
        return decoding

    def _check_indel(self) -> None:
        """Raise `ConfigError` where a rule that deletes and inserts, its model and the request do not fit together."""
        tokens, params = self.edit_tokens, self.params
        if (tokens is None) != (self.rule.indel is None):
            fitting = ", ".join(name for name, rule in REMASKING.items() if (rule.indel is None) == (tokens is None))
            what = "writes no tokens that delete and insert" if tokens is None else "deletes and inserts tokens"
            raise ConfigError(f"remasking {self.rule.name!r}: this model {what} places of a block; use {fitting}")
        if tokens is None or self.rule.indel is None:
            return
        given = np.asarray(self.prompt if self.template is None else [*self.prompt, *self.template.tokens])
        named = given[tokens.matches(given)]
        if len(named):
            raise ConfigError(
                f"the prompt holds the token {named[0]}, by which this model deletes or inserts a place of its answer "
                f"({tokens.delete} and {tokens.insert}); it has no meaning in a prompt, so leave it out"
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
        """Raise `ConfigError` where a fixed part follows the block of a hole, which would never attend to it."""
        if self.template is None:
            return
        pinned = np.flatnonzero(self.template.pinned) + len(self.prompt)
        late = pinned[pinned >= self.block_ranges[0].stop]
        if len(late):
            place = int(late[0]) - len(self.prompt)
            raise ConfigError(
                f"canvas: place {place} of the response is fixed, and stands in a block behind one with a hole. A "
                f"block-causal model sees its own block of {self.block} positions and what is before it, so it cannot "
                "fill a hole to suit what follows; end the canvas with its hole, or use a masked or uniform model"
            )

    @property
    def from_prompt(self) -> bool:
        return self.defaults.blocks_from_prompt

    @property
    def length(self) -> int:
        """Prompt and response, filled up to whole blocks where the family does so."""
        length = len(self.prompt) + self.params.max_tokens
        return -(-length // self.block) * self.block if self.defaults.whole_blocks else length

    @property
    def block_ranges(self) -> list[range]:
        """Blocks of the grid that hold positions to be denoised."""
        start = len(self.prompt) + (0 if self.template is None else self.template.holes[0].start)
        every = blocks_of(self.block, start - (start - self.ahead) % self.block, self.length)
        return [range(max(0, block.start), min(block.stop, self.length)) for block in every]

    @property
    def total_steps(self) -> int:
        if self.rule.indel is not None:
            return len(self.block_ranges) * self.rule.indel.max_passes(self.block, self.limits)
        return len(self.block_ranges) * (self.params.steps_per_block or self.block) + self._edit_steps

    @property
    def scheduled_steps(self) -> None:
        """None: a block ends as soon as it is full."""

    def passes(self, *, skips: bool) -> int:  # noqa: ARG002
        """Return the number of response positions, as every step fills one at least, and of steps that only edit."""
        if self.rule.indel is not None:
            return self.total_steps
        fixed = 0 if self.template is None else len(self.template) - self.template.open_places
        return self.length - len(self.prompt) - fixed + self._edit_steps

    @property
    def max_post_steps(self) -> int:
        """Steps of a block without masks, at most."""
        given = self.params.remasking.max_post_steps
        return (MAX_POST_STEPS if given is None else given) if self.rule.edits else 0

    @property
    def limits(self) -> Limits:
        """The parameters of each block under a rule that deletes and inserts."""
        params, given = self.params, self.params.remasking
        share = max(1, min(MAX_STEPS_PER_BLOCK, self.most_steps // len(self.block_ranges)))
        return Limits(
            threshold=INDEL_THRESHOLD if params.threshold is None else params.threshold,
            edit_threshold=INDEL_EDIT_THRESHOLD if given.edit_threshold is None else given.edit_threshold,
            max_post_steps=self.max_post_steps,
            steps=params.steps_per_block or INDEL_STEPS,
            max_steps=given.max_steps_per_block or share,
        )

    @property
    def _edit_steps(self) -> int:
        return len(self.block_ranges) * self.max_post_steps

    def ends_within(self, *, stop_written: bool) -> bool:
        """Return False, as in SDAR's code, unless the request asks for it.

        LLaDA2's code then looks for the end after steps that wrote a stop token, and after no others.
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

    _scheduled: int  # steps of the block's schedule so far, idle ones included

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas) -> None:
        # After temperature and before filters, as in JetEngine and in SDAR's sampler for evaluation. SDAR's generate.py
        # takes them after filters, where top_k=1 makes all confidences 1 and a threshold fills a block in one step.
        super().__init__(decoding.params, decoding.rule, "tempered", canvas, decoding.seed)
        self._length, self._steps = decoding.block, decoding.params.steps_per_block or decoding.block
        self._defaults = decoding.defaults
        number = (np.arange(len(canvas)) - decoding.ahead) // self._length
        # The end of each row's block: a row attends to its own block and all before it.
        sees: Reach = np.minimum((number + 1) * self._length + decoding.ahead, len(canvas))
        self._contexts = StepContext(sees=sees), StepContext(sees=sees, opens=True)
        self._linear = LinearSchedule(self._steps) if self._defaults.schedule == "linear" else None
        self._begin_block(decoding.block_ranges[0])
        self._prepare_step()

    @property
    def finished(self) -> bool:
        return self.block.stop == len(self.canvas) and not self._masks()

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. Rules that choose by more than a rank and one threshold must be asked."""
        threshold = self.params.threshold if self._rule.counts == "schedule" else None
        if self.params.blocks.sub_block_length is not None or self.params.remasking.fallback == "leftmost":
            return None
        if self._choose is scheduled:
            if threshold is None:
                return select.RankRule(self._count)
            return (
                select.RankRule.strictly_above(threshold, self._count)
                if self._strict
                else select.RankRule.above(threshold)
            )
        return self._blindly() if threshold is None else None

    def choose(self, predictions: Predicted) -> Positions:
        positions, confidence = predictions.positions, predictions.confidence
        part = self.params.blocks.sub_block_length
        if part is not None and len(positions):
            # Parts of the block are completed from left to right.
            stop = self.block.start + ((positions[0] - self.block.start) // part + 1) * part
            positions, confidence = positions[positions < stop], confidence[: int((positions < stop).sum())]
        return positions[self._chosen(positions, confidence)]

    def advance(self) -> None:
        self.step += 1
        self.block_step += 1
        self._scheduled += 1
        if self.block.stop < len(self.canvas) and not self._masks():
            stop = self.block.stop
            self._begin_block(range(stop, min(stop + self._length, len(self.canvas))))
        self._prepare_step()

    def _prepare_step(self) -> None:
        """Go to the next step of the schedule that transfers something. Idle ones are not counted."""
        if self._linear is not None and self._by_schedule:
            self._scheduled = self._linear.busy(self._scheduled, self._masks())
        self.context = self._contexts[self._defaults.opens_blocks and bool(self.canvas.noisy[self.block.start])]

    def _begin_block(self, block: range) -> None:
        self.block, self.block_step, self._scheduled = block, 0, 0
        self._shared = self._length if self._strict else self._masks()
        self._choose = self._rule.begin(BlockFacts(self._masks(), self._steps, self.params.knobs))

    def _chosen(self, positions: Positions, confidence: Confidence) -> select.Chosen:
        params, count = self.params, self._count
        if params.threshold is not None and self._rule.counts == "schedule":
            sure = np.flatnonzero(confidence > params.threshold if self._strict else confidence >= params.threshold)
            if len(sure) >= count:
                return sure
            if params.remasking.fallback == "leftmost":
                return np.flatnonzero(positions < positions[0] + count)
        return self._by_rule(positions, confidence, count)

    @property
    def _strict(self) -> bool:
        """Whether a threshold must be passed, by as many as the schedule of a whole block says."""
        return self._defaults.schedule == "even"

    @property
    def _by_schedule(self) -> bool:
        """Whether the schedule says how many positions a step transfers, at least."""
        return self._rule.counts == "schedule" and (self._strict or self.params.threshold is None)

    @property
    def _count(self) -> int:
        """Positions that the schedule transfers; after its last step, an incomplete block gets one more a step.

        One, too, under a threshold that replaces it.
        """
        if self._scheduled >= self._steps or (self._rule.counts == "schedule" and not self._by_schedule):
            return 1
        if self._linear is not None:
            return max(1, self._linear.count(self._scheduled, self._masks()))
        return max(1, even_count(self._shared, self._steps, self._scheduled))


class EditingDecoder(BlockCausalDecoder):
    """A decoding whose rule edits (LLaDA2.1): tokens of a block are final when the block is done, not before.

    A step fills masks as the rule says, and replaces tokens of earlier steps by others that the model is surer of than
    `edit_threshold`. A block is done once a step without masks changes nothing, or after `max_post_steps` of them.
    """

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas) -> None:
        self._masked = canvas.noisy.copy()
        super().__init__(decoding, canvas)
        self._max_post_steps, given = decoding.max_post_steps, decoding.params.remasking.edit_threshold
        self._edit_threshold = EDIT_THRESHOLD if given is None else given

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read, where asked for with a penalty on the token to the left within the block."""
        group, size = super().group(rows, positions), self.params.remasking.penalty_lambda
        if not size:
            return group
        left = np.where(positions > self.block.start, self.canvas.tokens[positions - 1], Penalty.NONE)
        return replace(group, penalty=Penalty(left, size))

    def choose(self, predictions: Predicted) -> Positions:
        """Return the masks that are filled and the tokens that are replaced now, ascending."""
        positions, tokens = predictions.positions, predictions.tokens
        masks = self._masked[positions]
        edits = ~masks & (predictions.confidence > self._edit_threshold) & (tokens != self.canvas.tokens[positions])
        filled = super().choose(predictions.of(masks)) if masks.any() else positions[:0]
        return np.union1d(filled, positions[edits])

    def outcome(self, written: Positions) -> Outcome:
        """See `Decoder`: the block's positions are final where it is done after this step, else none."""
        block = slice(self.block.start, self.block.stop)
        edits, editing = written[~self._masked[written]], not self._masked[block].any()
        self._masked[written] = False
        self._post += not self._masked[block].any()
        if (editing and not len(written)) or self._post > self._max_post_steps:
            return Outcome(np.flatnonzero(self.canvas.noisy[block]) + block.start, edits)
        return Outcome(written[:0], edits)

    def _begin_block(self, block: range) -> None:
        super()._begin_block(block)
        self._post = 0  # steps of the block without masks, the next one included


class IndelDecoder(BlockCausalDecoder):
    """A decoding whose rule deletes and inserts places (LLaDA2.2): nothing of a block is final before it is done.

    Tokens behind the end of a block are lost, and masks fill it up, so that blocks stay on their grid. At a temperature
    above 0 masks are filled with drawn tokens, and tokens are replaced by the most probable ones.
    """

    _state: IndelBlock  # of the places of the block that are not final
    _round: Round  # what the last pass did to it
    _edited: Positions

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas, rule: type[IndelBlock]) -> None:
        assert decoding.edit_tokens is not None
        self._edit_tokens, self._limits, self._mask_id = decoding.edit_tokens, decoding.limits, decoding.mask_id
        self._indel = rule
        super().__init__(decoding, canvas)

    @property
    def transfers(self) -> None:
        """None: what a step writes depends on the pass."""

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: as they are, for what is drawn is read beside them (`StepContext.numbers`)."""
        params = self.params
        return RowGroup(rows, None, "logits", 0.0, params.top_k, params.top_p, self._seed, self.step, positions)

    def choose(self, predictions: Predicted) -> Positions:
        """Return the positions whose tokens differ once DELETE and INSERT are carried out, ascending."""
        state, positions = self._state, predictions.positions
        assert predictions.numbers is not None
        before, masks = state.tokens, state.masks
        rng = np.random.default_rng([self._seed, self.step])
        self._round = state.choose(
            TokenCandidates.of(predictions.numbers, drawn=not self.params.greedy),
            lambda sure: int(sure.argmin() if self.params.greedy else rng.integers(len(sure))),
        )
        changed = state.tokens != before
        self._edited = positions[changed & ~masks]
        written: Positions = positions[changed]
        return written

    def outcome(self, written: Positions) -> Outcome:
        """See `Decoder`: the block's positions are final where it is done after this step, else none."""
        state, done = self._state, self._round
        first = self.block.stop - len(state.tokens)
        return Outcome(
            written[:0] if state.end_reason is None else np.arange(first, self.block.stop),
            written[np.isin(written, self._edited)],
            state.tokens[written - first],
            tuple((first + place, token) for place, token in sorted((*done.fills, *done.edits))),
        )

    def _prepare_step(self) -> None:
        """See the base. A pass reads as many of the most probable tokens as the state of the block may need."""
        super()._prepare_step()
        params, tokens = self.params, self._edit_tokens
        temperature = 0.0 if params.greedy else params.temperature
        numbers = MostProbable(self._state.candidate_count, temperature, (tokens.delete, tokens.insert))
        self.context = replace(self.context, numbers=numbers)

    def _begin_block(self, block: range) -> None:
        super()._begin_block(block)
        self._state = self._indel(self._masks(), self._mask_id, self._edit_tokens, self._limits)
