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
    Predictions,
    StepContext,
    Tokens,
    Transfers,
    blocks_of,
)
from remask.sampling.device_reads import BestTokens
from remask.sampling.rows import RowGroup
from remask.sampling.uniform_correction import PATIENCE, TEMPERATURE, Correction
from remask.sampling.uniform_score import NoisyRows, Transition

BLOCK = 128  # the published code's default
_WHOLE_CANVAS_FIELDS = "anchor", "trim", "frozen", "denoise_end", "min_log_snr", "max_log_snr"


def check_blockwise(params: SamplingParams) -> None:
    """Raise `ConfigError` on parameters that are only for models that denoise a canvas as a whole."""
    uniform = params.uniform
    name = next((f"uniform.{name}" for name in _WHOLE_CANVAS_FIELDS if getattr(uniform, name) is not None), None)
    advice = "leave it out"
    if name is None and uniform.sampler == GREEDY:
        name, advice = f"sampler={GREEDY!r}", "use 'adaptive'"
    if name is not None:
        raise ConfigError(
            f"{name} is for models that denoise their canvas as a whole, and this one goes block by block; {advice}"
        )


def check_initial(tokens: Sequence[int] | None, length: int, vocab_size: int) -> None:
    """Raise `ConfigError` if there are `tokens`, but not `length` valid ones, the noise of the canvas."""
    if tokens is not None and len(tokens) != length:
        raise ConfigError(
            f"initial_canvas must hold the {length} tokens of the canvas after the prompt, got {len(tokens)}"
        )
    check_tokens("initial_canvas", tokens or (), vocab_size)


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise `ConfigError` if the parameter `name` has a token id that is not below `vocab_size`."""
    invalid = next((token for token in tokens if token >= vocab_size), None)
    if invalid is not None:
        raise ConfigError(f"{name} holds {invalid}; token ids go from 0 to {vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class UniformDecoding(Decoding):
    """Uniform diffusion of one request, block by block.

    The canvas has the model's length, or `canvas_length`. Positions after the response are noise that is attended to
    and never changed. The last block may reach into it; its tokens there are not part of the answer. Blocks without a
    hole of the `template` are skipped. A row attends to a leading part of the canvas, so attention treats a fixed token
    as noise until its block is done or skipped.
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

        `structured`: the model was trained with structured attention.

        Raises `ConfigError` on parameters that contradict each other or cannot be met.
        """
        check_blockwise(params)
        initial = params.uniform.initial_canvas
        length = params.uniform.canvas_length or (model_length if initial is None else len(prompt) + len(initial))
        min_length = len(prompt) + params.max_tokens
        if length < min_length:
            raise ConfigError(
                f"canvas_length={length} is shorter than the prompt of {len(prompt)} tokens and "
                f"max_tokens={params.max_tokens} together; use {min_length} or more, or a shorter response"
            )
        check_initial(initial, length - len(prompt), noise.vocab)
        if noise.has_only_masks and params.uniform.correction_steps:
            raise ConfigError(
                f"correction_steps={params.uniform.correction_steps}: this model's noise is masks alone, so it never "
                "learned which tokens are wrong; leave it out"
            )
        decoding = cls(prompt, seed, params, noise, stop_ids, length, structured, template)
        decoding._check_revision()
        if decoding.ancestral and params.uniform.tokens_per_step is not None:
            raise ConfigError("tokens_per_step is the adaptive sampler's; the ancestral ones draw every position")
        change_count = decoding.steps * decoding.per_step
        if noise.has_only_masks and not decoding.ancestral and change_count > decoding.block_length:
            raise ConfigError(
                f"steps_per_block={decoding.steps} times tokens_per_step={decoding.per_step} is more than the "
                f"{decoding.block_length} masks of a block, and this model's noise is masks alone; lower one of them"
            )
        return decoding

    def _check_revision(self) -> None:
        """Raise `ConfigError` if `revision_tokens` is set and model, template or sampler cannot revise blocks."""
        tokens = self.params.uniform.revision_tokens
        if not tokens:
            return
        if self.structured:
            raise ConfigError(
                f"revision_tokens={tokens}: this model was trained under structured attention, where completed blocks "
                "do not see what comes after them; leave it out, or use correction_steps"
            )
        if self.noise.has_only_masks:
            raise ConfigError(f"revision_tokens={tokens}: this model's noise is masks alone; leave it out")
        if self.template is not None:
            raise ConfigError(f"revision_tokens={tokens}: a canvas has fixed parts; leave one of the two out")
        if self.ancestral:
            raise ConfigError(
                f"revision_tokens={tokens} is the adaptive sampler's; leave sampler={self.params.uniform.sampler!r} out"
            )

    @property
    def ancestral(self) -> bool:
        """Whether every step draws all positions of the block from the reverse step of the noise process."""
        return self.params.uniform.sampler in ANCESTRAL

    @property
    def block_length(self) -> int:
        return self.params.block_length or min(BLOCK, self.params.max_tokens)

    @property
    def block_ranges(self) -> list[range]:
        """Canvas positions of the blocks that hold positions to be denoised."""
        end = len(self.prompt) + self.params.max_tokens
        blocks = blocks_of(self.block_length, len(self.prompt), end)
        return [block for block in blocks if self._fixed_count(block) < min(block.stop, end) - block.start]

    @property
    def total_steps(self) -> int:
        steps = sum(self.block_steps(self._fixed_count(block)) for block in self.block_ranges)
        return steps + (self.params.uniform.correction_steps or 0)

    @property
    def steps(self) -> int:
        """Steps of a block without fixed tokens."""
        return self.block_steps(0)

    def block_steps(self, fixed_count: int) -> int:
        """Return the steps of a block with `fixed_count` fixed tokens."""
        return self.params.steps_per_block or max(1, (self.block_length - fixed_count) // self.per_step)

    def log_snr_grid(self, steps: int) -> NDArray[np.float64]:
        """Return the log-SNRs of a block of `steps` steps, the cleanest first, float64 [steps + 1]."""
        schedule = self.params.uniform.schedule or "cosine"
        return log_snrs(schedule, steps, self.noise.min_log_snr, self.noise.max_log_snr)

    def _fixed_count(self, block: range) -> int:
        """Return the number of positions of `block` that the template fixes."""
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

    If the request has correction steps, no position is final before the last of them. `block` is the new block, with
    two exceptions: in a correction it is the whole response, and in the first step of a block that may revise
    completed blocks it begins with the first completed block.
    """

    _steps: int  # of the new block
    _log_snrs: NDArray[np.float64]  # of the new block, the cleanest first, [steps + 1]
    _new_block: range  # the block that is denoised, without the completed blocks that its first step may revise

    def __init__(self, decoding: UniformDecoding, canvas: Canvas) -> None:
        super().__init__(canvas, decoding.seed)
        self._decoding = decoding
        self._params = decoding.params
        self._block_index = 0
        self._blocks = [range(block.start, min(block.stop, len(canvas))) for block in decoding.block_ranges]
        self._correction: Correction | None = None
        self._begin_block()
        self.context = self._context()

    @property
    def finished(self) -> bool:
        if self._correction is not None:
            return self._correction.finished
        return self._block_index == len(self._blocks)

    def _context(self) -> StepContext:
        """Return the context of the step. A correction with patience reads the most probable tokens."""
        correction = self._correction
        uniform = self._params.uniform
        if correction is None:
            corrections = 0 if uniform.correction_steps else None
            # A step that may revise completed blocks tells which block is new.
            fresh = self._new_block if self.block.start < self._new_block.start else None
            return StepContext(fresh=fresh, sees=self._sees(), corrections=corrections)
        touched = None
        if correction.steps:
            touched = correction.changed_blocks(self._decoding.block_length, len(self.canvas))
        device_read = None if uniform.correction_patience == 0 else BestTokens()
        return StepContext(touched=touched, sees=self._sees(), device_read=device_read, corrections=correction.steps)

    def _sees(self) -> Reach | None:
        """Return how many leading positions each row attends to, int64 [T]. Returns None without structured attention.

        The prompt and completed blocks attend to each other, noise attends to everything. In a correction the whole
        response counts as noise.
        """
        if not self._decoding.structured:
            return None
        clean = self.block.start
        return np.where(np.arange(len(self.canvas)) < clean, clean, len(self.canvas))

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. None in corrections and revisions, which compare with results of earlier passes."""
        if self._correction is not None or self._params.uniform.revision_tokens:
            return None
        count = len(self._new_block) if self._decoding.ancestral else self._decoding.per_step
        return select.RankRule(count, changes=True)

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: as gains (adaptive), draws of the reverse step (ancestral), or proposals."""
        params = self._params
        current = self.canvas.tokens[positions]
        # No end token may be written within `min_tokens`.
        banned_rows = int((positions < self.canvas.prompt + (params.min_tokens or 0)).sum())
        noisy = NoisyRows(current, banned=self._decoding.stop_ids, banned_rows=banned_rows)
        group = RowGroup(rows, seed=self._seed, step=self.step, positions=positions, noisy=noisy)
        if self._correction is None:
            group.noisy = self._with_step(noisy, positions, current)
            temperature = params.temperature
            group.top_k, group.top_p = params.top_k, params.top_p
        else:
            set_temperature = params.uniform.correction_temperature
            temperature = TEMPERATURE if set_temperature is None else set_temperature
            group.basis = "tempered"
        group.temperature = 0.0 if is_greedy(temperature) else temperature
        return group

    def _with_step(self, noisy: NoisyRows, positions: Positions, current: Tokens) -> NoisyRows:
        """Return `noisy` rows with what the sampler needs in this step: the transition (ancestral) or the weights."""
        decoding = self._decoding
        index = self._steps - self.block_step
        log_snr = float(self._log_snrs[index])
        if not decoding.ancestral:
            return self._with_weights(noisy, positions, current, log_snr)
        next_log_snr = float(self._log_snrs[index - 1])
        marginal = self._params.uniform.sampler == MARGINAL
        return replace(noisy, transition=Transition(decoding.noise, log_snr, next_log_snr, marginal=marginal))

    def choose(self, predictions: Predictions) -> Positions:
        """See `Decoder`. A correction records the pass."""
        positions, tokens, confidence = predictions.positions, predictions.tokens, predictions.confidence
        if self._correction is not None:
            if predictions.numbers is not None:
                self._correction.record_argmax(positions, predictions.numbers[0].astype(np.int64))
            current = self.canvas.tokens[self.block.start : self.block.stop]
            return self._correction.choose(current, positions, tokens, confidence)
        changed: NDArray[np.bool_] = tokens != self.canvas.tokens[positions]
        if self._decoding.ancestral:
            changed_positions: Positions = positions[changed]
            return changed_positions
        # A score of 0 is no gain: the best token is the current one, or noise never yields the current one.
        gains = confidence * (changed & (confidence > 0))
        completed = int(np.searchsorted(positions, self._new_block.start))
        revised = select.top(gains[:completed], self._params.uniform.revision_tokens or 0)
        rows = np.concatenate([revised, completed + select.top(confidence[completed:], self._decoding.per_step)])
        gaining_positions: Positions = positions[rows[gains[rows] > 0]]
        return gaining_positions

    def outcome(self, positions: Positions) -> Outcome:
        """See `Decoder`. A block is final in its last step, unless later steps may revise or correct it.

        With revisions or correction steps all blocks are final in the last step of the request.
        """
        uniform = self._params.uniform
        no_positions = positions[:0]
        if self._correction is not None:
            final = np.arange(self.block.start, self.block.stop) if self._correction.finished else no_positions
            return Outcome(final, edits=no_positions, tokens=self._correction.proposals(positions))
        is_final = self.block_step + 1 == self._steps and not uniform.correction_steps
        start = self._new_block.start
        if uniform.revision_tokens:
            is_final = is_final and self._block_index + 1 == len(self._blocks)
            start = self.canvas.prompt
        final = np.arange(start, self.block.stop) if is_final else no_positions
        revised = no_positions if self.context.fresh is None else positions[positions < self._new_block.start]
        return Outcome(final, edits=revised)

    def advance(self) -> None:
        """Go to the next step: after a block's last step to the next block, and after the last block to corrections."""
        block = self.block
        self.step += 1
        self.block_step += 1
        if self._correction is None:
            self._advance_block()
        if self._correction is not None or self.block != block:  # a new context would be packed again
            self.context = self._context()

    def _advance_block(self) -> None:
        """Go to the next step of the block; after its last step begin the next block, or the corrections."""
        self.block = self._new_block
        if self.block_step < self._steps:
            return
        self._block_index += 1
        self.block_step = 0
        if not self.finished:
            self._begin_block()
        elif self._params.uniform.correction_steps:
            self._begin_correction(self._params.uniform.correction_steps)
        else:
            self.block = range(self._new_block.stop, self._new_block.stop)  # empty, so that all rows are clean

    def _begin_block(self) -> None:
        """Begin the block at the current index, at full noise, and set its schedule."""
        decoding = self._decoding
        block = self._blocks[self._block_index]
        self._new_block = block
        revises = self._block_index > 0 and self._params.uniform.revision_tokens
        self.block = range(self.canvas.prompt, block.stop) if revises else block
        noisy_count = int(np.count_nonzero(self.canvas.noisy[block.start : block.stop]))
        self._steps = decoding.block_steps(len(block) - noisy_count)
        self._log_snrs = decoding.log_snr_grid(self._steps)

    def _begin_correction(self, steps: int) -> None:
        """Begin a correction of at most `steps` steps; the whole response becomes the current block."""
        uniform = self._params.uniform
        canvas = self.canvas
        self.block = range(canvas.prompt, canvas.end)
        patience = PATIENCE if uniform.correction_patience is None else uniform.correction_patience
        open_count = int(np.count_nonzero(canvas.noisy[canvas.prompt : canvas.end]))
        self._correction = Correction(self.block, steps, uniform.correction_tokens or 1, patience, open_count)

    def _with_weights(self, noisy: NoisyRows, positions: Positions, current: Tokens, log_snr: float) -> NoisyRows:
        """Return `noisy` rows with the weights of the adaptive sampler."""
        table = None if self._params.uniform.revision_tokens else self._weight_table(len(positions), log_snr)
        return replace(noisy, weights=self._weights(positions, current, log_snr), table=table)

    def _weights(self, positions: Positions, current: Tokens, log_snr: float) -> NDArray[np.float32]:
        """Return the probability of each `current` token as noise, normalised over the block, float32 [positions].

        Completed blocks are normalised separately, at the cleanest log-SNR.
        """
        completed = int(np.searchsorted(positions, self._new_block.start))
        weights = []
        clean_log_snr = float(self._log_snrs[0])
        for tokens, tokens_log_snr in ((current[:completed], clean_log_snr), (current[completed:], log_snr)):
            is_mask = tokens == self._decoding.noise.mask_id
            table = self._weight_table(len(tokens), tokens_log_snr)
            weights.append(table[np.count_nonzero(is_mask), is_mask.astype(np.int64)])
        return np.concatenate(weights)

    def _weight_table(self, count: int, log_snr: float) -> NDArray[np.float32]:
        """Return the weights of `count` tokens by the number of masks among them, float32 [count + 1, 2].

        Column 0 has the weight of a token that is no mask, column 1 that of a mask.
        """
        noise = self._decoding.noise
        mask_counts = np.arange(count + 1)[:, None]
        # Any id but the mask's stands for all other tokens, which are equally probable.
        priors = noise.probability(np.array([noise.mask_id + 1, noise.mask_id]), log_snr)
        totals = mask_counts * priors[1] + (count - mask_counts) * priors[0]
        # A total of 0 means that noise yields no such tokens; their weights are not normalised then.
        table: NDArray[np.float64] = np.divide(priors, totals, out=np.tile(priors, (count + 1, 1)), where=totals > 0)
        return table.astype(np.float32)
