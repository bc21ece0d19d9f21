"""Decoding by uniform and hybrid diffusion (GIDD): any token of the current block may change at any step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from remask.denoising import select
from remask.denoising.noise import Noise, log_snrs
from remask.errors import ConfigError
from remask.plan.canvas import OPEN, Canvas, Template
from remask.plan.plan import Reach
from remask.policies.base import IdlePasses
from remask.request.sampling_groups import ANCESTRAL, GREEDY, MARGINAL
from remask.request.sampling_params import SamplingParams, is_greedy
from remask.sampling.decoder import (
    Decoder,
    Decoding,
    Outcome,
    Positions,
    Predicted,
    StepContext,
    Tokens,
    Transfers,
    blocks_of,
)
from remask.sampling.device_reads import Best
from remask.sampling.rows import Basis, RowGroup
from remask.sampling.uniform_correction import PATIENCE, TEMPERATURE, Correction
from remask.sampling.uniform_score import NoisyRows, Transition

BLOCK = 128  # the published code's default


def check_blockwise(params: SamplingParams) -> None:
    """Raise `ConfigError` on parameters of models that denoise a canvas as a whole."""
    for name in ("anchor", "trim", "frozen", "denoise_end", "min_log_snr", "max_log_snr"):
        if getattr(params.uniform, name) is not None:
            raise ConfigError(
                f"uniform.{name} is for models that denoise their canvas as a whole, and this one goes block by block; "
                "leave it out"
            )
    if params.uniform.sampler == GREEDY:
        raise ConfigError(
            f"sampler={GREEDY!r} is for models that denoise their canvas as a whole, and this one goes block by block; "
            "use 'adaptive'"
        )


def check_initial(tokens: Sequence[int] | None, places: int, vocab: int) -> None:
    """Raise `ConfigError` where `tokens`, if any are given, are not those of so many places behind a prompt."""
    if tokens is not None and len(tokens) != places:
        raise ConfigError(
            f"initial_canvas must hold the {places} tokens of the canvas after the prompt, got {len(tokens)}"
        )
    check_tokens("initial_canvas", tokens or (), vocab)


def check_tokens(name: str, tokens: Sequence[int], vocab: int) -> None:
    """Raise `ConfigError` where the parameter `name` holds tokens that a model of `vocab` tokens has not."""
    foreign = next((token for token in tokens if token >= vocab), None)
    if foreign is not None:
        raise ConfigError(f"{name} holds {foreign}; token ids go from 0 to {vocab - 1}")


@dataclass(frozen=True, slots=True)
class UniformDecoding(Decoding):
    """Uniform diffusion of one request, block by block.

    The canvas is as long as the model's, or as `canvas_length` says; positions after the response are noise that is
    attended to and never changed. The last block may reach into it; tokens there are not part of the answer.
    Blocks without a hole of the `template` are passed over. A fixed token counts as noise for attention until its block
    is done or passed, as a row sees a leading part of the canvas.
    """

    params: SamplingParams
    noise: Noise
    stop_ids: tuple[int, ...]
    length: int = field()  # without a default, which the property of the base would be
    structured: bool = True
    template: Template | None = None

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        noise: Noise,
        stop_ids: tuple[int, ...],
        model_length: int,
        seed: int,
        structured: bool = True,
        template: Template | None = None,
    ) -> "UniformDecoding":
        """Return the decoding on a model whose canvas has `model_length` positions.

        `structured`: it was trained under structured attention.

        Raises `ConfigError` on parameters that contradict each other or cannot be met.
        """
        check_blockwise(params)
        given = params.uniform.initial_canvas
        length = params.uniform.canvas_length or (model_length if given is None else len(prompt) + len(given))
        needed = len(prompt) + params.max_tokens
        if length < needed:
            raise ConfigError(
                f"canvas_length={length} is shorter than the prompt of {len(prompt)} tokens and "
                f"max_tokens={params.max_tokens} together; use {needed} or more, or a shorter response"
            )
        check_initial(given, length - len(prompt), noise.vocab)
        if noise.only_masks and params.uniform.correction_steps:
            raise ConfigError(
                f"correction_steps={params.uniform.correction_steps}: this model's noise is masks alone, so it never "
                "learned which tokens are wrong; leave it out"
            )
        decoding = cls(prompt, seed, params, noise, stop_ids, length, structured, template)
        decoding._check_revision()
        if decoding.ancestral and params.uniform.tokens_per_step is not None:
            raise ConfigError("tokens_per_step is the adaptive sampler's; the ancestral ones draw every position")
        changes = decoding.steps * decoding.per_step
        if noise.only_masks and not decoding.ancestral and changes > decoding.block:
            raise ConfigError(
                f"steps_per_block={decoding.steps} times tokens_per_step={decoding.per_step} is more than the "
                f"{decoding.block} masks of a block, and this model's noise is masks alone; lower one of them"
            )
        return decoding

    def _check_revision(self) -> None:
        tokens = self.params.uniform.revision_tokens
        if not tokens:
            return
        if self.structured:
            raise ConfigError(
                f"revision_tokens={tokens}: this model was trained under structured attention, where completed blocks "
                "do not see what comes after them; leave it out, or use correction_steps"
            )
        if self.noise.only_masks:
            raise ConfigError(f"revision_tokens={tokens}: this model's noise is masks alone; leave it out")
        if self.template is not None:
            raise ConfigError(f"revision_tokens={tokens}: a canvas has fixed parts; leave one of the two out")
        if self.ancestral:
            raise ConfigError(
                f"revision_tokens={tokens} is the adaptive sampler's; leave sampler={self.params.uniform.sampler!r} out"
            )

    @property
    def ancestral(self) -> bool:
        """Whether every step draws all positions of the block from the reverse process."""
        return self.params.uniform.sampler in ANCESTRAL

    @property
    def block(self) -> int:
        return self.params.block_length or min(BLOCK, self.params.max_tokens)

    @property
    def block_ranges(self) -> list[range]:
        """Blocks from the end of the prompt on that hold positions to be denoised."""
        end = len(self.prompt) + self.params.max_tokens
        every = blocks_of(self.block, len(self.prompt), end)
        return [block for block in every if self._pinned(block) < min(block.stop, end) - block.start]

    @property
    def total_steps(self) -> int:
        return sum(self.steps_of(self._pinned(block)) for block in self.block_ranges) + (
            self.params.uniform.correction_steps or 0
        )

    @property
    def steps(self) -> int:
        """Steps of a block without fixed tokens."""
        return self.steps_of(0)

    def steps_of(self, pinned: int) -> int:
        """Return the steps of a block of which so many tokens are fixed."""
        return self.params.steps_per_block or max(1, (self.block - pinned) // self.per_step)

    def levels(self, steps: int) -> NDArray[np.float64]:
        """Return the log-SNRs of a block of so many steps, the cleanest first, float64 [steps + 1]."""
        schedule = self.params.uniform.schedule or "cosine"
        return log_snrs(schedule, steps, self.noise.min_log_snr, self.noise.max_log_snr)

    def _pinned(self, block: range) -> int:
        if self.template is None:
            return 0
        first = block.start - len(self.prompt)
        return sum(token != OPEN for token in self.template.tokens[first : first + len(block)])

    @property
    def per_step(self) -> int:
        """Positions that a step of the adaptive sampler may change."""
        return self.params.uniform.tokens_per_step or 1

    def canvas(self) -> Canvas:
        noise: Sequence[int] | NDArray[np.int64]
        if self.params.uniform.initial_canvas is None:
            noise = self.noise.draw(self.length - len(self.prompt), self.seed)
        else:
            noise = self.params.uniform.initial_canvas
        return Canvas(self.prompt, noise, self.params.max_tokens, self.template)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "UniformDecoder":  # noqa: ARG002
        """Return a decoder at the first step. All steps are run, as in the original code."""
        return UniformDecoder(self, canvas)


class UniformDecoder(Decoder):
    """The decoding of one request in progress.

    Where the request has correction steps, nothing is final before the last of them. The current block is in a
    correction the whole response, and at a border where completed blocks may be revised these and the one that begins.
    """

    def __init__(self, decoding: UniformDecoding, canvas: Canvas) -> None:
        super().__init__(canvas, decoding.seed)
        self._decoding, self._params = decoding, decoding.params
        self._index = 0
        self._blocks = [range(block.start, min(block.stop, len(canvas))) for block in decoding.block_ranges]
        self._correction: Correction | None = None
        self._begin_block()
        self.context = self._context()

    @property
    def finished(self) -> bool:
        if self._correction is not None:
            return self._correction.finished
        return self._index == len(self._blocks)

    def _context(self) -> StepContext:
        """What the passes of the step need to know. A correction that has patience reads the most probable tokens."""
        correction, uniform = self._correction, self._params.uniform
        if correction is None:
            corrections = 0 if uniform.correction_steps else None
            return StepContext(fresh=self._revising(), sees=self._sees(), corrections=corrections)
        touched = correction.touched(self._decoding.block, len(self.canvas)) if correction.steps else None
        numbers = None if uniform.correction_patience == 0 else Best()
        return StepContext(touched=touched, sees=self._sees(), numbers=numbers, corrections=correction.steps)

    def _revising(self) -> range | None:
        """The block that begins, in a step that may revise completed blocks as well; None elsewhere."""
        return self._fresh if self.block.start < self._fresh.start and self._correction is None else None

    def _sees(self) -> Reach | None:
        """How many leading positions each row attends to, int64 [T]; None without structured attention: all.

        The prompt and completed blocks attend to one another, noise attends to everything. In a correction the whole
        response counts as noise.
        """
        if not self._decoding.structured:
            return None
        clean = self.block.start
        return np.where(np.arange(len(self.canvas)) < clean, clean, len(self.canvas))

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. Unknown in corrections and revisions, which compare with results of earlier passes."""
        if self._correction is not None or self._params.uniform.revision_tokens:
            return None
        every = self._decoding.ancestral
        return select.RankRule(len(self._fresh) if every else self._decoding.per_step, changes=True)

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: as gains (adaptive), draws of the reverse step (ancestral), or proposals."""
        decoding, params = self._decoding, self._params
        given, filters = params.temperature, (params.top_k, params.top_p)
        basis: Basis = "logits"
        current = self.canvas.tokens[positions]
        noisy = NoisyRows(current, banned=decoding.stop_ids, banned_rows=self._early(positions))
        if self._correction is not None:
            basis, filters = "tempered", (None, None)
            given = (
                TEMPERATURE if params.uniform.correction_temperature is None else params.uniform.correction_temperature
            )
        else:
            level = self._steps - self.block_step
            before, after = float(self._levels[level]), float(self._levels[level - 1])
            if decoding.ancestral:
                step = Transition(decoding.noise, before, after, marginal=params.uniform.sampler == MARGINAL)
                noisy = replace(noisy, transition=step)
            else:
                noisy = self._weighed(noisy, positions, current, before)
        temperature = 0.0 if is_greedy(given) else given
        return RowGroup(rows, None, basis, temperature, *filters, self._seed, self.step, positions, noisy=noisy)

    def choose(self, predictions: Predicted) -> Positions:
        positions, tokens, confidence = predictions.positions, predictions.tokens, predictions.confidence
        if self._correction is not None:
            if predictions.numbers is not None:
                self._correction.note(positions, predictions.numbers[0].astype(np.int64))
            current = self.canvas.tokens[self.block.start : self.block.stop]
            return self._correction.choose(current, positions, tokens, confidence)
        changed: NDArray[np.bool_] = tokens != self.canvas.tokens[positions]
        if self._decoding.ancestral:
            everywhere: Positions = positions[changed]
            return everywhere
        # A score of 0 means no gain: the best token stands there already, or noise cannot have put the current one.
        gains = confidence * (changed & (confidence > 0))
        begun = int(np.searchsorted(positions, self._fresh.start))
        revised = select.top(gains[:begun], self._params.uniform.revision_tokens or 0)
        chosen = np.concatenate([revised, begun + select.top(confidence[begun:], self._decoding.per_step)])
        written: Positions = positions[chosen[gains[chosen] > 0]]
        return written

    def outcome(self, written: Positions) -> Outcome:
        """See `Decoder`. Final is what no later step can change: the block in its last step, where nothing revises it.

        With revisions or correction steps it is all blocks, in the last step of all.
        """
        params, edits, tokens = self._params, written[:0], None
        if self._correction is not None:
            over, start, tokens = self._correction.finished, self.block.start, self._correction.proposals(written)
        else:
            if self.context.fresh is not None:
                edits = written[written < self._fresh.start]
            over, start = self.block_step + 1 == self._steps and not params.uniform.correction_steps, self._fresh.start
            if params.uniform.revision_tokens:
                over, start = over and self._index + 1 == len(self._blocks), self.canvas.prompt
        final = np.arange(start, self.block.stop) if over else np.empty(0, dtype=np.int64)
        return Outcome(final, edits, tokens)

    def advance(self) -> None:
        """Go on to the next step, to the next block at full noise after the last one, and to corrections in the end."""
        block = self.block
        self.step += 1
        self.block_step += 1
        if self._correction is None:
            self._go_on()
        if self._correction is not None or self.block != block:  # a new context would be packed again
            self.context = self._context()

    def _go_on(self) -> None:
        """Go on to what follows a step that is no correction."""
        self.block = self._fresh
        if self.block_step == self._steps:
            self._index += 1
            self.block_step = 0
            if not self.finished:
                self._begin_block()
            elif self._params.uniform.correction_steps:
                self._begin_correction(self._params.uniform.correction_steps)
            else:
                self.block = range(self._fresh.stop, self._fresh.stop)  # nothing is left that noise could see

    def _begin_block(self) -> None:
        """Set the schedule of the block, which begins at full noise."""
        decoding, block = self._decoding, self._blocks[self._index]
        self._fresh = block
        self.block = (
            range(self.canvas.prompt, block.stop) if self._index and self._params.uniform.revision_tokens else block
        )
        self._steps = decoding.steps_of(len(block) - int(np.count_nonzero(self.canvas.noisy[block.start : block.stop])))
        self._levels = decoding.levels(self._steps)

    def _begin_correction(self, steps: int) -> None:
        params, canvas = self._params, self.canvas
        self.block = range(canvas.prompt, canvas.end)
        patience = PATIENCE if params.uniform.correction_patience is None else params.uniform.correction_patience
        tokens = int(np.count_nonzero(canvas.noisy[canvas.prompt : canvas.end]))
        self._correction = Correction(self.block, steps, params.uniform.correction_tokens or 1, patience, tokens)

    def _early(self, positions: Positions) -> int:
        """Return how many of `positions` are too early for an end token."""
        return int((positions < self.canvas.prompt + (self._params.min_tokens or 0)).sum())

    def _weighed(self, noisy: NoisyRows, positions: Positions, current: Tokens, level: float) -> NoisyRows:
        """Return `noisy` rows with the weights of the adaptive sampler."""
        table = None if self._params.uniform.revision_tokens else self._table(len(positions), level)
        return replace(noisy, weights=self._weights(positions, current, level), table=table)

    def _weights(self, positions: Positions, current: Tokens, level: float) -> NDArray[np.float32]:
        """Return the probability of each current token as noise, normalised over the block, float32.

        Completed blocks have weights of their own, of the cleanest level.
        """
        begun = int(np.searchsorted(positions, self._fresh.start))
        parts = []
        for tokens, at in ((current[:begun], float(self._levels[0])), (current[begun:], level)):
            masks = tokens == self._decoding.noise.mask_id
            parts.append(self._table(len(tokens), at)[np.count_nonzero(masks), masks.astype(np.int64)])
        return np.concatenate(parts)

    def _table(self, tokens: int, level: float) -> NDArray[np.float32]:
        """Return the weights of a token that is no mask, and of a mask, for each number of masks among so many tokens.

        Float32 [tokens + 1, 2].
        """
        noise, masks = self._decoding.noise, np.arange(tokens + 1)[:, None]
        priors = noise.probability(np.array([noise.mask_id + 1, noise.mask_id]), level)
        totals = masks * priors[1] + (tokens - masks) * priors[0]
        table: NDArray[np.float32] = np.divide(priors, totals, out=np.tile(priors, (tokens + 1, 1)), where=totals > 0)
        return table.astype(np.float32)
