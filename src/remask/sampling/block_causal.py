"""Denoising under a block-causal mask (SDAR): blocks on an absolute grid, each complete before the next begins."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remask.core.canvas import Canvas
from remask.core.plan import Reach
from remask.core.sampling import SamplingParams
from remask.errors import ConfigError
from remask.policies.base import IdlePasses
from remask.sampling import select
from remask.sampling.decoder import Confidence, Positions, Tokens, Uncorrected
from remask.sampling.schedule import even_counts
from remask.sampling.score import RowGroup, step_seed

ENTROPY_BOUND = 0.35  # JetEngine's default


@dataclass(frozen=True, slots=True)
class BlockCausalDecoding:
    """Block-causal diffusion of one request.

    Blocks are cut at multiples of `block` from the start of the canvas, so the first one may begin with the prompt's
    last tokens, and the last one may reach beyond the response; what it holds there is not part of the answer.
    """

    prompt: Sequence[int]
    params: SamplingParams
    block: int
    mask_id: int
    seed: int

    @classmethod
    def of(
        cls, prompt: Sequence[int], params: SamplingParams, block: int | None, mask_id: int, seed: int
    ) -> "BlockCausalDecoding":
        """The decoding on a model that was trained with blocks of `block`. Raises `ConfigError` on bad parameters."""
        length = params.block_length or block
        if length is None:
            raise ConfigError("block_length is not in the model's config.json: give the one that it was trained with")
        if params.remasking in ("sequential", "entropy_bounded") and params.threshold is not None:
            raise ConfigError(f"threshold compares confidences, which remasking {params.remasking!r} does not rank by")
        if params.fallback is not None and params.threshold is None:
            raise ConfigError("fallback says what is taken where too few pass the threshold; set threshold, too")
        if params.sub_block_length is not None and length % params.sub_block_length:
            raise ConfigError(
                f"sub_block_length={params.sub_block_length} is no divisor of the block of {length}; use one that is"
            )
        if params.eb_threshold is not None and params.remasking != "entropy_bounded":
            raise ConfigError("eb_threshold is for remasking 'entropy_bounded'")
        return cls(prompt, params, length, mask_id, seed)

    @property
    def length(self) -> int:
        """Prompt and response, filled up to whole blocks."""
        return -(-(len(self.prompt) + self.params.max_tokens) // self.block) * self.block

    @property
    def ordered(self) -> bool:
        """Positions are chosen after the pass."""
        return False

    @property
    def whole_blocks(self) -> bool:
        """As the originals: a block that was begun is completed."""
        return True

    def canvas(self) -> Canvas:
        """The prompt, and masks to the end of the last block."""
        masks = [self.mask_id] * (self.length - len(self.prompt))
        return Canvas(self.prompt, masks, self.params.max_tokens)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "BlockCausalDecoder":  # noqa: ARG002
        """A decoder at the first step. No step is idle: each transfers at least one token."""
        return BlockCausalDecoder(self, canvas)


class BlockCausalDecoder(Uncorrected):
    """One request's place in its decoding. It reads the canvas and never writes to it."""

    def __init__(self, decoding: BlockCausalDecoding, canvas: Canvas) -> None:
        self._decoding, self._canvas = decoding, canvas
        self.step = 0
        self.block_step = 0
        self._counts = even_counts(decoding.block, decoding.params.steps_per_block or decoding.block)
        self._index = canvas.prompt // decoding.block

    @property
    def finished(self) -> bool:
        """Every block is complete."""
        return self.block.stop == len(self._canvas) and not self._noisy()

    @property
    def block(self) -> range:
        """The current block, the last one when finished."""
        start = self._index * self._decoding.block
        return range(start, start + self._decoding.block)

    @property
    def sees(self) -> Reach:
        """A row attends to its own block and all before it."""
        length = self._decoding.block
        return (np.arange(len(self._canvas)) // length + 1) * length

    @property
    def order(self) -> None:
        """Positions are chosen after the pass."""
        return

    def group(self, rows: slice, positions: Positions) -> RowGroup:  # noqa: ARG002
        """By probability or entropy, after temperature and before filters."""
        params = self._decoding.params
        return RowGroup(
            rows=rows,
            measure="entropy" if params.remasking == "entropy_bounded" else "probability",
            basis="tempered",
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=step_seed(self._decoding.seed, self.step),
        )

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:  # noqa: ARG002
        """Positions to transfer now, ascending, of the noisy ones of the block."""
        part = self._decoding.params.sub_block_length
        if part is not None and len(positions):
            # Parts of the block are completed from left to right.
            stop = self.block.start + ((positions[0] - self.block.start) // part + 1) * part
            positions, confidence = positions[positions < stop], confidence[: int((positions < stop).sum())]
        return positions[self._choose(positions, confidence)]

    def final(self, written: Positions) -> Positions:
        """What is transferred is final."""
        return written

    def advance(self) -> None:
        """On to the next step, or to the next block when this one is complete."""
        self.step += 1
        self.block_step += 1
        if not self._noisy() and self.block.stop < len(self._canvas):
            self._index += 1
            self.block_step = 0

    def _noisy(self) -> bool:
        return bool(self._canvas.noisy[self.block.start : self.block.stop].any())

    def _choose(self, positions: Positions, confidence: Confidence) -> select.Chosen:
        params = self._decoding.params
        # A block that is not complete after the scheduled steps goes on, one token at a time.
        scheduled = int(self._counts[self.block_step]) if self.block_step < len(self._counts) else 0
        count = max(1, scheduled)
        if params.remasking == "entropy_bounded":
            bound = ENTROPY_BOUND if params.eb_threshold is None else params.eb_threshold
            return select.entropy_bounded(-confidence, bound)
        window = np.flatnonzero(positions < positions[0] + count)
        if params.remasking == "sequential":
            return window
        if params.threshold is None:
            return select.top(confidence, count)
        sure = np.flatnonzero(confidence > params.threshold)
        if len(sure) >= count:
            return sure
        return window if params.fallback == "leftmost" else select.top(confidence, count)
