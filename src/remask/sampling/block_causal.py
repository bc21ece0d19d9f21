"""Decoding under a block-causal mask (SDAR): blocks on an absolute grid, each completed before the next begins."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.plan.plan import Reach
from remask.policies.base import IdlePasses
from remask.remasking import select
from remask.remasking.rules import (
    EDIT_THRESHOLD,
    MAX_POST_STEPS,
    RULES,
    BlockStart,
    Remasking,
    Step,
    check_progress,
    scheduled,
)
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.decoder import Confidence, FixedCanvas, Positions, Tokens, Transfers, Uncorrected, blocks_of
from remask.sampling.rows import Penalty, RowGroup
from remask.sampling.schedule import even_count


@dataclass(frozen=True, slots=True)
class BlockCausalDecoding(FixedCanvas):
    """Block-causal diffusion of one request.

    Blocks are cut at multiples of `block` from the start of the canvas, so the first one may begin with the prompt's
    last tokens, and the last one may reach beyond the response; tokens there are not part of the answer.
    Fixed tokens of a `template` must be before its first hole, or in the block of its last one.
    """

    prompt: Sequence[int]
    params: SamplingParams
    rule: Remasking
    block: int
    mask_id: int
    seed: int
    template: Template | None = None

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
    ) -> "BlockCausalDecoding":
        """Return the decoding on a model of a family with these `defaults`, trained with blocks of `block`.

        Raises `ConfigError` on parameters that contradict each other or cannot be met.
        """
        length = params.block_length or block
        if length is None:
            raise ConfigError("block_length is not in the model's config.json: give the one that it was trained with")
        rule = RULES.get(params.remasking or defaults.remasking)
        if params.threshold is not None and not rule.thresholds:
            raise ConfigError(
                f"threshold compares confidences, which remasking {rule.name!r} does not rank by; leave one of them out"
            )
        if params.fallback is not None and params.threshold is None:
            raise ConfigError("fallback says what is taken where too few pass the threshold; set threshold, too")
        if params.sub_block_length is not None and length % params.sub_block_length:
            raise ConfigError(
                f"sub_block_length={params.sub_block_length} is no divisor of the block of {length}; use one that is"
            )
        if params.eb_threshold is not None and rule.name != "entropy_bounded":
            raise ConfigError("eb_threshold is for remasking 'entropy_bounded': set both, or neither")
        decoding = cls(prompt, params, rule, length, mask_id, seed, template)
        decoding._check_template()
        return decoding

    def _check_template(self) -> None:
        """Raise `ConfigError` where a fixed part follows the block of a hole, which would never attend to it."""
        if self.template is None:
            return
        pinned = np.flatnonzero(self.template.pinned) + len(self.prompt)
        late = pinned[pinned // self.block > self.first]
        if len(late):
            place = int(late[0]) - len(self.prompt)
            raise ConfigError(
                f"canvas: place {place} of the response is fixed, and stands in a block behind one with a hole. A "
                f"block-causal model sees its own block of {self.block} positions and what is before it, so it cannot "
                "fill a hole to suit what follows; end the canvas with its hole, or use a masked or uniform model"
            )

    @property
    def first(self) -> int:
        """Number of the first block with a position to be denoised."""
        start = 0 if self.template is None else self.template.holes[0].start
        return (len(self.prompt) + start) // self.block

    @property
    def length(self) -> int:
        """Prompt and response, filled up to whole blocks."""
        return -(-(len(self.prompt) + self.params.max_tokens) // self.block) * self.block

    @property
    def block_ranges(self) -> list[range]:
        """Blocks of the grid that hold positions to be denoised."""
        return blocks_of(self.block, self.first * self.block, self.length)

    @property
    def total_steps(self) -> int:
        """Steps of all blocks."""
        return self._blocks * (self.params.steps_per_block or self.block) + self._edit_steps

    @property
    def scheduled_steps(self) -> None:
        """None: a block ends as soon as it is full."""

    def passes(self, *, skips: bool) -> int:  # noqa: ARG002
        """Return the number of response positions, as every step fills one at least, and of steps that only edit."""
        fixed = 0 if self.template is None else len(self.template) - self.template.open_places
        return self.length - len(self.prompt) - fixed + self._edit_steps

    @property
    def max_post_steps(self) -> int:
        """Steps of a block without masks, at most."""
        given = self.params.max_post_steps
        return (MAX_POST_STEPS if given is None else given) if self.rule.edits else 0

    @property
    def _blocks(self) -> int:
        return self.length // self.block - self.first

    @property
    def _edit_steps(self) -> int:
        return self._blocks * self.max_post_steps

    @property
    def ordered(self) -> bool:
        """False: positions are chosen after the pass."""
        return False

    def ends_within(self, *, stop_written: bool) -> bool:
        """Return False, as in SDAR's code, unless the request asks for it.

        LLaDA2's code then looks for the end after steps that wrote a stop token, and after no others.
        """
        return self.params.early_stop and stop_written

    def canvas(self) -> Canvas:
        """Return a canvas of the prompt, with masks to the end of the last block."""
        masks = [self.mask_id] * (self.length - len(self.prompt))
        return Canvas(self.prompt, masks, self.params.max_tokens, self.template)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "BlockCausalDecoder":  # noqa: ARG002
        """Return a decoder at the first step. No step is idle: each may transfer a token."""
        return EditingDecoder(self, canvas) if self.rule.edits else BlockCausalDecoder(self, canvas)


class BlockCausalDecoder(Uncorrected):
    """The decoding of one request in progress. It reads the canvas and never writes to it."""

    writes_once = True

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas) -> None:
        self._decoding, self.canvas = decoding, canvas
        self.step = 0
        self.block_step = 0
        self._steps = decoding.params.steps_per_block or decoding.block
        self._index = decoding.first
        self._begin_block()

    @property
    def finished(self) -> bool:
        """Whether every block is complete."""
        return self.block.stop == len(self.canvas) and not self._noisy()

    @property
    def block(self) -> range:
        """The current block, the last one when finished."""
        start = self._index * self._decoding.block
        return range(start, start + self._decoding.block)

    @property
    def sees(self) -> Reach:
        """The end of each row's block, int64 [T]: a row attends to its own block and all before it."""
        length = self._decoding.block
        return (np.arange(len(self.canvas)) // length + 1) * length

    @property
    def order(self) -> None:
        """None: positions are chosen after the pass."""
        return

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. Rules that choose by more than a rank and one threshold must be asked."""
        params, rule = self._decoding.params, self._decoding.rule
        threshold = params.threshold if rule.counts == "schedule" else None
        if params.sub_block_length is not None or params.fallback == "leftmost":
            return None
        if self._choose is scheduled:
            count = self._count
            return select.Ranked(count) if threshold is None else select.Ranked.beyond(threshold, count)
        if threshold is not None or not rule.blind:
            return None
        block = self.block
        candidates = block.start + self.canvas.noisy[block.start : block.stop].nonzero()[0]
        return self.choose(candidates, candidates, np.zeros(len(candidates), dtype=np.float32))

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: by the rule's measure, after temperature and before filters."""
        params = self._decoding.params
        return RowGroup(
            rows=rows,
            measure=self._decoding.rule.measure,
            basis="tempered",
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=self._decoding.seed,
            step=self.step,
            positions=positions,
        )

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:  # noqa: ARG002
        """Return which of the noisy `positions` of the block are transferred now, ascending."""
        part = self._decoding.params.sub_block_length
        if part is not None and len(positions):
            # Parts of the block are completed from left to right.
            stop = self.block.start + ((positions[0] - self.block.start) // part + 1) * part
            positions, confidence = positions[positions < stop], confidence[: int((positions < stop).sum())]
        return positions[self._chosen(positions, confidence)]

    def final(self, written: Positions) -> Positions:
        """Return `written`: what is transferred is final."""
        return written

    def advance(self) -> None:
        """Go on to the next step, or to the next block when this one is complete."""
        self.step += 1
        self.block_step += 1
        if not self._noisy() and self.block.stop < len(self.canvas):
            self._index += 1
            self._begin_block()

    def _begin_block(self) -> None:
        self.block_step = 0
        masks = int(np.count_nonzero(self.canvas.noisy[self.block.start : self.block.stop]))
        self._choose = self._decoding.rule.begin(BlockStart(masks, self._steps, self._decoding.params))

    def _noisy(self) -> bool:
        return bool(np.count_nonzero(self.canvas.noisy[self.block.start : self.block.stop]))

    def _chosen(self, positions: Positions, confidence: Confidence) -> select.Chosen:
        params, count = self._decoding.params, self._count
        if params.threshold is not None and self._decoding.rule.counts == "schedule":
            sure = np.flatnonzero(confidence > params.threshold)
            if len(sure) >= count:
                return sure
            if params.fallback == "leftmost":
                return np.flatnonzero(positions < positions[0] + count)
        step = Step(
            positions=positions,
            confidence=confidence,
            number=self.block_step,
            count=count,
            share=None,
            order=None,
            draw=self._draw,
        )
        return check_progress(self._decoding.rule, self._choose(step), step, self._steps)

    @property
    def _count(self) -> int:
        """Positions that the schedule transfers; after its last step, an incomplete block gets one more a step."""
        if self.block_step >= self._steps:
            return 1
        return max(1, even_count(self._decoding.block, self._steps, self.block_step))

    def _draw(self, count: int) -> NDArray[np.float32]:
        """Uniform numbers that depend on the request's seed and step alone."""
        return np.random.default_rng([self._decoding.seed, self.step]).random(count, dtype=np.float32)


class EditingDecoder(BlockCausalDecoder):
    """A decoding whose rule edits (LLaDA2.1): tokens of a block are final when the block is done, not before.

    A step fills masks as the rule says, and replaces tokens of earlier steps by others that the model is surer of than
    `edit_threshold`. A block is done once a step without masks changes nothing, or after `max_post_steps` of them.
    """

    writes_once = False

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas) -> None:
        self._masked = canvas.noisy.copy()
        super().__init__(decoding, canvas)
        given = decoding.params.edit_threshold
        self._edit_threshold = EDIT_THRESHOLD if given is None else given

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read, where asked for with a penalty on the token to the left within the block."""
        group, size = super().group(rows, positions), self._decoding.params.penalty_lambda
        if not size:
            return group
        left = np.where(positions > self.block.start, self.canvas.tokens[positions - 1], Penalty.NONE)
        return replace(group, penalty=Penalty(left, size))

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:
        """Return the masks that are filled and the tokens that are replaced now, ascending."""
        masks = self._masked[positions]
        edits = ~masks & (confidence > self._edit_threshold) & (tokens != self.canvas.tokens[positions])
        filled = super().choose(positions[masks], tokens[masks], confidence[masks]) if masks.any() else positions[:0]
        return np.union1d(filled, positions[edits])

    def edited(self, written: Positions) -> Positions:
        """See `Decoder`."""
        return written[~self._masked[written]]

    def final(self, written: Positions) -> Positions:
        """Return the block's positions where it is done after this step, else none."""
        block = slice(self.block.start, self.block.stop)
        editing = not self._masked[block].any()
        self._masked[written] = False
        self._post += not self._masked[block].any()
        if (editing and not len(written)) or self._post > self._decoding.max_post_steps:
            return np.flatnonzero(self.canvas.noisy[block]) + block.start
        return written[:0]

    def _begin_block(self) -> None:
        super()._begin_block()
        self._post = 0  # steps of the block without masks, the next one included
