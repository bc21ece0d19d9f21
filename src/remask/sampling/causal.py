"""Decoding of models whose final rows are causal, and of which a request chooses the mode (Nemotron-Labs-Diffusion).

"ar" writes a token a pass. "diffusion" writes a token from the left, then denoises the block that begins with it.
"linear_speculation" drafts as a block is denoised, in one pass, and keeps what "ar" would have written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from remask.checks.fields import paths
from remask.denoising import select
from remask.denoising.rules import RULES, THRESHOLD, BlockFacts, Remasking, check_threshold
from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.plan.plan import Reach
from remask.policies.base import IdlePasses
from remask.request.sampling_params import DIFFUSION, MODES, SPECULATION, SamplingParams, fits_mode
from remask.sampling.decoder import Decoding, Outcome, Positions, Predicted, RuleDecoder, StepContext, blocks_of
from remask.sampling.rows import RowGroup

WINDOW, MAX_WINDOW = 8, 32  # of the authors' linear self-speculation


@dataclass(frozen=True, slots=True)
class CausalDecoding(Decoding):
    """One request in one of the modes.

    Attributes:
        params: its sampling parameters.
        mode: how it is decoded.
        rule: which masks of a block become final in a pass.
        length_of_blocks: positions of a block in mode "diffusion", counted from the end of the prompt.
        mask_id: the mask token.
        drafter: the adapter that drafts are computed with; None: the request's own, if any.
    """

    params: SamplingParams
    mode: str
    rule: Remasking
    length_of_blocks: int
    mask_id: int
    drafter: str | None

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        block: int | None,
        mask_id: int,
        seed: int,
        template: Template | None,
        drafter: str | None,
    ) -> "CausalDecoding":
        """Return the decoding on a model trained with blocks of `block`, whose folder holds the adapter `drafter`.

        Raises `ConfigError` on parameters that contradict each other or cannot be met.
        """
        mode, rule = params.mode or DIFFUSION, RULES.get(params.remasking.rule or "low_confidence")
        if template is not None:
            raise ConfigError(
                "canvas: this model writes behind what is final, and sees nothing after it; leave fixed parts of the "
                "response out, or use a masked model"
            )
        params.check_rule(rule)
        if rule.edits:
            raise ConfigError(f"remasking {rule.name!r} edits tokens, and a block here is final once it has no masks")
        for path in paths(SamplingParams):
            if not fits_mode(path, mode) and attrgetter(path)(params) is not None:
                own = next(each for each in MODES if fits_mode(path, each))
                raise ConfigError(f"{path} is for mode {own!r}, and this one is {mode!r}; leave one of the two out")
        for path in ("remasking.fallback", "remasking.eb_threshold", "blocks.sub_block_length"):
            if attrgetter(path)(params) is not None:
                raise ConfigError(f"{path} has no meaning on models that a mode is chosen for; leave it out")
        check_threshold(rule, params.threshold)
        least, most = params.speculation.draft_window, params.speculation.max_draft_window
        if least is not None and most is not None and least > most:
            raise ConfigError(f"speculation.draft_window={least} is above max_draft_window={most}; lower it")
        if params.speculation.lora and drafter is None:
            raise ConfigError("speculation.lora: the model's folder has no adapter for drafts; leave lora out")
        length = params.block_length or block
        if length is None:
            raise ConfigError("block_length is not in the model's config.json: give the one that it was trained with")
        adapter = drafter if params.speculation.lora is not False and mode == SPECULATION else None
        return cls(prompt, seed, params, mode, rule, length, mask_id, adapter)

    @property
    def block(self) -> int:
        """1: what is final depends on nothing behind it, so pages of all modes are the same, token by token."""
        return 1

    @property
    def length(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def block_ranges(self) -> list[range]:
        """Blocks from the end of the prompt, the last of which may be shorter; single tokens in other modes."""
        length = self.length_of_blocks if self.mode == DIFFUSION else 1
        blocks = blocks_of(length, len(self.prompt), self.length)
        return [range(block.start, min(block.stop, self.length)) for block in blocks]

    @property
    def total_steps(self) -> int:
        """A step for each first token of a block, and the most that its masks take."""
        return sum(1 + min(self.params.steps_per_block or len(block), len(block) - 1) for block in self.block_ranges)

    @property
    def scheduled_steps(self) -> None:
        """None: a block ends as soon as it is full."""

    def passes(self, *, skips: bool) -> int:  # noqa: ARG002
        """Return the number of steps, each of which has a draft before it where there are drafts."""
        return self.total_steps * (2 if self.mode == SPECULATION else 1)

    def ends_within(self, *, stop_written: bool) -> bool:  # noqa: ARG002
        """Return True unless the request asks for whole blocks.

        NVIDIA's code leaves a block after the step in which no mask is left before an end token, whichever of the two
        that step wrote.
        """
        return self.params.blocks.early_stop is not False

    def canvas(self) -> Canvas:
        return Canvas.masked(self.prompt, self.params.max_tokens, self.mask_id)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "CausalDecoder":  # noqa: ARG002
        return CausalDecoder(self, canvas)


class CausalDecoder(RuleDecoder):
    """The decoding of one request in progress.

    A causal pass computes the rows up to the last final one, and predicts what follows them (`shift` 1). A pass over
    the block that begins with this last token predicts the masks of the block (`shift` 0). Nothing that it writes
    stays: the next causal pass computes its rows again.
    """

    def __init__(self, decoding: CausalDecoding, canvas: Canvas) -> None:
        # NVIDIA's code takes the probability of the drawn token before temperature.
        super().__init__(decoding.params, decoding.rule, "logits", canvas, decoding.seed)
        self._mode, self._length, self._drafter = decoding.mode, decoding.length_of_blocks, decoding.drafter
        self._mask_id = decoding.mask_id
        self._causal: Reach = np.arange(1, len(canvas) + 1)
        given = decoding.params.speculation
        self._most = given.max_draft_window or max(MAX_WINDOW, given.draft_window or 0)
        self._least = self._window = given.draft_window or min(WINDOW, self._most)
        self._committed = 0  # before the first pass the policy knows what is shared
        self._follow(canvas.prompt, 1)

    @property
    def finished(self) -> bool:
        return self._begun == len(self.canvas)

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read. But for mode "diffusion" a position's draws are the same in every pass."""
        group = super().group(rows, positions)
        group.free = self.context.shift == 1
        if self._mode != DIFFUSION:
            group.step = 0
        return group

    def choose(self, predictions: Predicted) -> Positions:
        """Return what follows final tokens: the leading tokens of a draft that come true, and the one after them.

        Of a block that is denoised what the rule chooses, and all in its last step.
        """
        positions, tokens, confidence = predictions.positions, predictions.tokens, predictions.confidence
        if self.context.shift == 1:
            true = tokens[:-1] == self.canvas.tokens[positions[:-1]]
            return positions[: 1 + (len(true) if true.all() else int(true.argmin()))]
        if len(positions) == 1 or self.block_step >= self._steps:
            return positions
        if self._rule.counts == "schedule" and self._rule.thresholds:
            threshold = THRESHOLD if self.params.threshold is None else self.params.threshold
            return positions[select.above(confidence, threshold)]
        return positions[self._by_rule(positions, confidence, 1)]

    def outcome(self, written: Positions) -> Outcome:
        """See `Decoder`: masks stand again where a draft did not come true."""
        rejected = np.arange(self.block.start + len(written), self.block.stop)
        if self.context.shift != 1 or not len(rejected):
            return Outcome(written)
        return Outcome(written, resets=(rejected, np.full(len(rejected), self._mask_id)))

    def advance(self) -> None:
        """Go on to the next step: of a block that has masks the next one, else what follows the last final token.

        After a draft it goes to the causal pass over it, which is a part of the same step.
        """
        if self.context.drafts:
            self._follow(self.block.start + 1, len(self.block))
            return
        self.step += 1
        self.block_step += 1
        if self.context.shift == 0 and self._masks():
            return
        begun, length = self._begun, len(self.canvas)
        if self.context.shift == 1:
            self._committed = begun - 1  # the row of the last token is computed with what follows it
            if self._mode == SPECULATION:
                self._fit_window(begun - self.block.start)
                if (size := min(self._window, length - begun)) > 1:
                    self._denoise(size, drafts=True)
                    return
            if self._mode == DIFFUSION and (size := min(self._length, length - begun + 1)) > 1:
                self._denoise(size, drafts=False)
                return
        self._follow(begun, 1)

    @property
    def _begun(self) -> int:
        """The first position that is not final."""
        return self.canvas.prompt + self.canvas.settled_lead

    def _fit_window(self, taken: int) -> None:
        """Draft more where all was `taken` of the last draft, and less where at most half was."""
        if len(self.block) > 1 and taken == len(self.block):
            self._window = min(2 * self._window, self._most)
        elif 2 * taken <= len(self.block):
            self._window = max(self._window // 2, self._least)

    def _follow(self, start: int, size: int) -> None:
        """A causal pass that predicts `size` positions from `start` on."""
        self.block, self.block_step = range(start, start + size), 0
        self.context = StepContext(sees=self._causal, shift=1, committed=self._committed)

    def _denoise(self, size: int, *, drafts: bool) -> None:
        """A pass over the block of `size` positions that begins with the last final token."""
        start, stop = self._begun - 1, self._begun - 1 + size
        self.block, self.block_step = range(start, stop), 0 if drafts else 1
        sees = self._causal.copy()  # rows of a block that is denoised see all of it
        sees[start:stop] = stop
        adapter = self._drafter if drafts else None
        self.context = StepContext(sees=sees, shift=0, committed=self._committed, adapter=adapter, drafts=drafts)
        self._steps = min(self.params.steps_per_block or size, size)
        self._choose = self._rule.begin(BlockFacts(size - 1, self._steps, self.params.knobs))
