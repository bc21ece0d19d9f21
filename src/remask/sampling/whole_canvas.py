"""Uniform diffusion of a whole canvas at once (Sumi): every step may change all of it, also after the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from remask.denoising import select
from remask.denoising.noise import Noise, canvas_log_snrs
from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.policies.base import IdlePasses
from remask.request.sampling_groups import GREEDY
from remask.request.sampling_params import SamplingParams
from remask.sampling.decoder import Positions, Predictions, Tokens, Transfers
from remask.sampling.rows import RowGroup
from remask.sampling.uniform import UniformDecoder, UniformDecoding, check_initial, check_tokens
from remask.sampling.uniform_score import NoisyRows

# The defaults of the authors' code: steps, positions of the canvas, sampler and schedule.
STEPS, CANVAS = 128, 2048
SAMPLER, SCHEDULE = "ancestral", "linear"


@dataclass(frozen=True, slots=True)
class WholeCanvasDecoding(UniformDecoding):
    """Uniform diffusion of one request on one canvas, which is one block.

    By default an end and a begin token follow the positions of the answer (`Noise.anchor`). They never change, and
    neither do frozen tokens, fixed parts of a `template` and the positions from `denoise_end` on.
    """

    @classmethod
    def on_canvas(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        noise: Noise,
        stop_ids: tuple[int, ...],
        model_length: int,
        seed: int,
        template: Template | None = None,
    ) -> "WholeCanvasDecoding":
        """Return the decoding on a model of at most `model_length` positions.

        Raises `ConfigError` on parameters that contradict each other, cannot be met or have no meaning here.
        """
        uniform = params.uniform
        unsupported = {"block_length": params.block_length, "min_tokens": params.min_tokens or None}
        names = ("preset", "correction_steps", "revision_tokens")
        unsupported |= {f"uniform.{name}": getattr(uniform, name) or None for name in names}
        for name, value in unsupported.items():
            if value is not None:
                raise ConfigError(f"{name}={value}: this model denoises its whole canvas at once; leave it out")
        length = min(uniform.canvas_length or CANVAS, model_length)
        decoding = cls(prompt, seed, params, noise, stop_ids, length, structured=False, template=template)
        decoding._check_params()
        return decoding

    def _check_params(self) -> None:
        """Raise `ConfigError` unless prompt, answer, fixed tokens and log-SNRs fit the canvas and each other."""
        uniform = self.params.uniform
        anchor_length = self._anchor_length
        prompt_length = len(self.prompt)
        if prompt_length + anchor_length >= self.length:
            raise ConfigError(
                f"the canvas of {self.length} positions has no room behind the prompt of {prompt_length} tokens"
                f"{' and the two that close the answer' if anchor_length else ''}; raise canvas_length, which the "
                "model may limit, or shorten the prompt"
            )
        if self.template is not None and prompt_length + len(self.template) + anchor_length > self.length:
            raise ConfigError(
                f"canvas: {len(self.template)} places do not fit behind the prompt of {prompt_length} tokens on a "
                f"canvas of {self.length} positions; raise canvas_length, or make it shorter"
            )
        if self.template is not None and uniform.frozen is not None:
            raise ConfigError("canvas and uniform.frozen both say what is fixed; leave one of them out")
        if self.template is not None and uniform.trim is False:
            raise ConfigError("uniform.trim: a canvas with fixed parts ends with its last one; leave one of them out")
        check_initial(uniform.initial_canvas, self.length - prompt_length, self.noise.vocab)
        pairs = uniform.frozen or ()
        if any(len(pair) != 2 for pair in pairs):
            raise ConfigError("uniform.frozen holds pairs of a canvas position and a token id")
        check_tokens("uniform.frozen", [token for _, token in pairs], self.noise.vocab)
        lowest, highest = self._log_snrs
        if lowest >= highest:
            raise ConfigError(f"min_log_snr={lowest:g} must be below max_log_snr={highest:g}")
        if self._sampler != "adaptive" and uniform.tokens_per_step is not None:
            raise ConfigError(f"tokens_per_step is the adaptive sampler's, and this is {self._sampler!r}; leave it out")

    @property
    def _sampler(self) -> str:
        return self.params.uniform.sampler or SAMPLER

    @property
    def ancestral(self) -> bool:
        return self._sampler not in ("adaptive", GREEDY)

    @property
    def greedy(self) -> bool:
        """Whether every position gets its most probable token."""
        return self._sampler == GREEDY

    @property
    def _log_snrs(self) -> tuple[float, float]:
        """The log-SNRs of the noisiest and of the cleanest step."""
        uniform = self.params.uniform
        return (
            self.noise.min_log_snr if uniform.min_log_snr is None else uniform.min_log_snr,
            self.noise.max_log_snr if uniform.max_log_snr is None else uniform.max_log_snr,
        )

    @property
    def _anchor_length(self) -> int:
        """Positions that are reserved for the end and begin tokens after the answer, even if other tokens are fixed."""
        return 0 if self.params.uniform.anchor is False else 2

    @property
    def _answer_length(self) -> int:
        """Positions of the answer: `max_tokens`, or as many as fit."""
        return max(1, min(self.params.max_tokens, self.length - len(self.prompt) - self._anchor_length))

    def response_template(self, template: Template) -> Template:
        """Return the template of the answer, which reaches to the end of the canvas unless an end token is fixed."""
        if self.template is not None:
            return template
        uniform = self.params.uniform
        has_end = self._anchor_length > 0 and uniform.frozen is None and uniform.trim is not False
        return Template.plain(self._answer_length if has_end else self.length - len(self.prompt))

    @property
    def block_length(self) -> int:
        return self.length - len(self.prompt)

    @property
    def block_ranges(self) -> list[range]:
        return [range(len(self.prompt), self.length)]

    def block_steps(self, fixed_count: int) -> int:  # noqa: ARG002
        return self.params.steps_per_block or STEPS

    def log_snr_grid(self, steps: int) -> NDArray[np.float64]:
        return canvas_log_snrs(self.params.uniform.schedule or SCHEDULE, steps, *self._log_snrs)

    def canvas(self) -> Canvas:
        """Return a new canvas of noise. Frozen tokens, or else the anchor, and the tail are final from the start."""
        uniform = self.params.uniform
        first = len(self.prompt)
        initial = uniform.initial_canvas
        noise = self.noise.draw(self.block_length, self.seed) if initial is None else initial
        response = self.response_template(self.template or Template.plain(self.params.max_tokens))
        canvas = Canvas(self.prompt, noise, len(response), self.template)
        pairs = uniform.frozen
        if pairs is None:
            assert self.noise.anchor is not None
            end = first + (self._answer_length if self.template is None else len(self.template))
            pairs = list(enumerate(self.noise.anchor, end)) if self._anchor_length else ()
        # Reversed, so that of several tokens for one position the first one counts.
        fixed = {position: token for position, token in reversed(pairs) if first <= position < self.length}
        canvas.tokens[list(fixed)] = list(fixed.values())
        tail_start = self.length if uniform.denoise_end is None else max(first, uniform.denoise_end)
        for position in (*fixed, *range(tail_start, self.length)):
            canvas.noisy[position] = False
            canvas.settled[position] = -1  # as the prompt
        return canvas

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "WholeCanvasDecoder":  # noqa: ARG002
        """Return a decoder at the first step. All steps are run, as in the original code."""
        return WholeCanvasDecoder(self, canvas)


class WholeCanvasDecoder(UniformDecoder):
    """The decoding of one request in progress. Every row sees every row, and all is final after the last step."""

    _decoding: WholeCanvasDecoding

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`. None if the adaptive sampler draws, as it may replace even the most probable token."""
        if self._decoding.ancestral or self._decoding.greedy:
            return select.RankRule(len(self.block), changes=True)
        return select.RankRule(self._decoding.per_step, changes=True) if self._params.greedy else None

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        if self._decoding.greedy:
            return RowGroup(rows, seed=self._seed, step=self.step, positions=positions, free=True)
        return super().group(rows, positions)

    def choose(self, predictions: Predictions) -> Positions:
        positions = predictions.positions
        changed: Positions = positions[predictions.tokens != self.canvas.tokens[positions]]
        if self._decoding.ancestral or self._decoding.greedy:
            return changed
        best = select.top(predictions.confidence, self._decoding.per_step)
        written: Positions = np.intersect1d(changed, positions[best])
        return written

    def _with_weights(self, noisy: NoisyRows, positions: Positions, current: Tokens, log_snr: float) -> NoisyRows:  # noqa: ARG002
        return replace(noisy, weights=np.ones(len(positions), dtype=np.float32))
