"""Decoding of models whose final rows are causal, and of which a request chooses the mode (Nemotron-Labs-Diffusion).

"ar" writes one token per pass. "diffusion" writes a token from the left, then denoises the block that begins with it.
"linear_speculation" drafts a block by denoising it in one pass, and keeps the tokens that "ar" would have written.
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
from remask.sampling.decoder import Decoding, Outcome, Positions, Predictions, RuleDecoder, StepContext, blocks_of
from remask.sampling.rows import RowGroup

WINDOW, MAX_WINDOW = 8, 32  # tokens of a draft at first and at most, as in the authors' linear self-speculation


@dataclass(frozen=True, slots=True)
class CausalDecoding(Decoding):
    """One request in one of the modes.

    Attributes:
        params: its sampling parameters.
        mode: how it is decoded.
        rule: chooses the masks of a block that become final in a pass.
        diffusion_length: positions of a block in mode "diffusion", counted from the end of the prompt.
        mask_id: the mask token.
        drafter: name of the adapter that drafts are computed with; None: the request's own, if any.
    """

    params: SamplingParams
    mode: str
    rule: Remasking
    diffusion_length: int
    mask_id: int
    drafter: str | None

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        block_length: int | None,
        mask_id: int,
        seed: int,
        template: Template | None,
        drafter: str | None,
    ) -> "CausalDecoding":
        """Return the decoding on a model trained with blocks of `block_length`; its folder has the adapter `drafter`.

        Raises `ConfigError` on parameters that contradict each other or cannot be met.
        """
        mode = params.mode or DIFFUSION
        rule = RULES.get(params.remasking.rule or "low_confidence")
        if template is not None:
            raise ConfigError(
                "canvas: this model writes behind what is final, and sees nothing after it; leave fixed parts of the "
                "response out, or use a masked model"
            )
        _check_params(params, mode, rule, drafter)
        diffusion_length = params.block_length or block_length
        if diffusion_length is None:
            raise ConfigError("block_length is not in the model's config.json: give the one that it was trained with")
        used_drafter = drafter if params.speculation.lora is not False and mode == SPECULATION else None
        return cls(prompt, seed, params, mode, rule, diffusion_length, mask_id, used_drafter)

    @property
    def block_length(self) -> int:
        """1: final rows do not depend on later ones, so pages are shared token by token, in all modes."""
        return 1

    @property
    def length(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def block_ranges(self) -> list[range]:
        """Blocks from the end of the prompt on; the last may be shorter. Only those of "diffusion" exceed one token."""
        length = self.diffusion_length if self.mode == DIFFUSION else 1
        blocks = blocks_of(length, len(self.prompt), self.length)
        return [range(block.start, min(block.stop, self.length)) for block in blocks]

    @property
    def total_steps(self) -> int:
        """A step for the first token of each block, and as many as its masks may take."""
        return sum(1 + min(self.params.steps_per_block or len(block), len(block) - 1) for block in self.block_ranges)

    @property
    def scheduled_steps(self) -> None:
        """None: a block ends as soon as it is full."""

    def max_passes(self, *, skips: bool) -> int:  # noqa: ARG002
        """Return the number of steps, doubled if each has a draft pass before it."""
        return self.total_steps * (2 if self.mode == SPECULATION else 1)

    def may_stop_within_block(self, *, stop_written: bool) -> bool:  # noqa: ARG002
        """Return True unless the request asks for whole blocks.

        NVIDIA's code leaves a block after the step that fills the last mask before an end token, or writes the end
        token where no mask is before it.
        """
        return self.params.blocks.early_stop is not False

    def canvas(self) -> Canvas:
        return Canvas.masked(self.prompt, self.params.max_tokens, self.mask_id)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "CausalDecoder":  # noqa: ARG002
        return CausalDecoder(self, canvas)


def _check_params(params: SamplingParams, mode: str, rule: Remasking, drafter: str | None) -> None:
    """Raise `ConfigError` on parameters that contradict each other, the mode or the rule, or need an absent drafter."""
    params.check_rule(rule)
    if rule.edits:
        raise ConfigError(f"remasking {rule.name!r} edits tokens, and a block here is final once it has no masks")
    for path in paths(SamplingParams):
        if not fits_mode(path, mode) and attrgetter(path)(params) is not None:
            other = next(other for other in MODES if fits_mode(path, other))
            raise ConfigError(f"{path} is for mode {other!r}, and this one is {mode!r}; leave one of the two out")
    for path in ("remasking.fallback", "remasking.eb_threshold", "blocks.sub_block_length"):
        if attrgetter(path)(params) is not None:
            raise ConfigError(f"{path} has no meaning on models that a mode is chosen for; leave it out")
    check_threshold(rule, params.threshold)
    min_window, max_window = params.speculation.draft_window, params.speculation.max_draft_window
    if min_window is not None and max_window is not None and min_window > max_window:
        raise ConfigError(f"speculation.draft_window={min_window} is above max_draft_window={max_window}; lower it")
    if params.speculation.lora and drafter is None:
        raise ConfigError("speculation.lora: the model's folder has no adapter for drafts; leave lora out")


class CausalDecoder(RuleDecoder):
    """The decoding of one request in progress.

    A causal pass computes the rows up to the last final one, and predicts the next tokens (`shift` 1). A pass over the
    block that begins with the last final token predicts the masks of the block (`shift` 0). Its K/V are not kept: the
    next causal pass computes these rows again.
    """

    def __init__(self, decoding: CausalDecoding, canvas: Canvas) -> None:
        # NVIDIA's code takes the probability of the drawn token before temperature.
        super().__init__(decoding.params, decoding.rule, "logits", canvas, decoding.seed)
        self._mode = decoding.mode
        self._block_length = decoding.diffusion_length
        self._drafter = decoding.drafter
        self._mask_id = decoding.mask_id
        self._causal_reach: Reach = np.arange(1, len(canvas) + 1)
        speculation = decoding.params.speculation
        self._max_window = speculation.max_draft_window or max(MAX_WINDOW, speculation.draft_window or 0)
        self._min_window = speculation.draft_window or min(WINDOW, self._max_window)
        self._window = self._min_window
        self._committed = 0  # before the first pass only the policy knows how many rows are shared
        self._prepare_causal_pass(canvas.prompt, 1)

    @property
    def finished(self) -> bool:
        return self._first_open == len(self.canvas)

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read. In modes but "diffusion" a position has the same draws in every pass."""
        group = super().group(rows, positions)
        group.free = self.context.shift == 1
        if self._mode != DIFFUSION:
            group.step = 0
        return group

    def choose(self, predictions: Predictions) -> Positions:
        """Return the positions that are written now, ascending.

        A causal pass writes the leading draft tokens that it predicts too, and the token after them. A pass over a
        block writes the positions that the rule chooses, and in the block's last step all masks.
        """
        positions, tokens, confidence = predictions.positions, predictions.tokens, predictions.confidence
        if self.context.shift == 1:
            is_accepted = tokens[:-1] == self.canvas.tokens[positions[:-1]]
            return positions[: 1 + (len(is_accepted) if is_accepted.all() else int(is_accepted.argmin()))]
        if len(positions) == 1 or self.block_step >= self._steps:
            return positions
        if self._rule.counts == "schedule" and self._rule.thresholds:
            threshold = THRESHOLD if self.params.threshold is None else self.params.threshold
            return positions[select.above(confidence, threshold)]
        return positions[self._apply_rule(positions, confidence, 1)]

    def outcome(self, positions: Positions) -> Outcome:
        """See `Decoder`. Rejected draft tokens become masks again."""
        rejected = np.arange(self.block.start + len(positions), self.block.stop)
        if self.context.shift != 1 or not len(rejected):
            return Outcome(positions)
        return Outcome(positions, resets=(rejected, np.full(len(rejected), self._mask_id)))

    def advance(self) -> None:
        """Go to the next step of a block that has masks left, else to the token after the last final one.

        After a draft, go to the causal pass that verifies it, which is a part of the same step.
        """
        if self.context.drafts:
            self._prepare_causal_pass(self.block.start + 1, len(self.block))
            return
        self.step += 1
        self.block_step += 1
        if self.context.shift == 0 and self._count_masks():
            return
        first_open = self._first_open
        length = len(self.canvas)
        if self.context.shift == 1:
            self._committed = first_open - 1  # the last token's row is computed again, with the tokens after it
            if self._mode == SPECULATION:
                self._adapt_window(first_open - self.block.start)
                if (size := min(self._window, length - first_open)) > 1:
                    self._prepare_block_pass(size, drafts=True)
                    return
            if self._mode == DIFFUSION and (size := min(self._block_length, length - first_open + 1)) > 1:
                self._prepare_block_pass(size, drafts=False)
                return
        self._prepare_causal_pass(first_open, 1)

    @property
    def _first_open(self) -> int:
        """The first position that is not final."""
        return self.canvas.prompt + self.canvas.settled_lead

    def _adapt_window(self, written_count: int) -> None:
        """Double the draft window if the whole block was written, and halve it if at most half of it was.

        `written_count` is the number of final tokens of the block: the accepted draft tokens, and one more.
        """
        if len(self.block) > 1 and written_count == len(self.block):
            self._window = min(2 * self._window, self._max_window)
        elif 2 * written_count <= len(self.block):
            self._window = max(self._window // 2, self._min_window)

    def _prepare_causal_pass(self, start: int, size: int) -> None:
        """Set block and context for a causal pass that predicts `size` positions from `start` on."""
        self.block = range(start, start + size)
        self.block_step = 0
        self.context = StepContext(sees=self._causal_reach, shift=1, committed=self._committed)

    def _prepare_block_pass(self, size: int, *, drafts: bool) -> None:
        """Set block, context and rule for passes over `size` positions, of which the first is the last final token.

        If the pass `drafts`, it belongs to the step of the causal pass that verifies it, and counts no step of its own.
        """
        start = self._first_open - 1
        stop = start + size
        self.block = range(start, stop)
        self.block_step = 0 if drafts else 1
        sees = self._causal_reach.copy()  # rows of a block that is denoised see all of it
        sees[start:stop] = stop
        adapter = self._drafter if drafts else None
        self.context = StepContext(sees=sees, shift=0, committed=self._committed, adapter=adapter, drafts=drafts)
        self._steps = min(self.params.steps_per_block or size, size)
        self._choose = self._rule.begin(BlockFacts(size - 1, self._steps, self.params.knobs))
