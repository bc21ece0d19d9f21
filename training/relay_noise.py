"""Training canvases of the bundled uniform model: those of the relay task, with noise in the place of masks.

A canvas is what the engine shows the model at some step of some block: the prompt and the blocks before are clean, a
window is denoised, and what stands behind it is noise. Clean rows see clean rows only. In the window uniform noise over
the vocabulary stands where `relay_data` has masks, or, in some canvases, towns at random: mistakes look like that. Half
of the batches have noise behind the response, as long canvases do.

For the variational bound every window is noise of the forward process, at one step of a chain that is drawn for each
canvas.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from remask.tasks import relay
from training.noise_bound import Levels
from training.relay_data import Batch, CanvasSource

TRAILING: Final = 26
"""Most tokens of noise behind a response."""


@dataclass(frozen=True, slots=True)
class NoisyBatch:
    """Canvases [batch, length] and how they were made.

    Attributes:
        tokens: what the model sees, [batch, length + what trails behind the response].
        noisy: which of these rows are noisy; all others are clean.
        window: the rows that are learned from, [batch, length] as all that follow.
        wrong: those of them that noise replaced.
        known: those of these that follow from a row that was not replaced.
        made: the canvases that they were made of.
        steps: the steps of the chain, [batch]; None where the windows follow none.
    """

    tokens: Tensor
    noisy: Tensor
    window: Tensor
    wrong: Tensor
    known: Tensor
    made: Batch
    steps: Tensor | None = None


class NoisySource:
    """Draws batches from one random stream."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, seed: int, context: int, chain: Levels | None = None
    ) -> None:
        """`context`: the longest canvas. `chain`: levels that windows are noised to; None: as decoding leaves them.

        `mistaken` may be set: the share of the canvases whose wrong tokens are towns, where there is no chain.
        """
        self.mistaken = 0.2
        self.canvases = CanvasSource(tokenizer, seed)
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._vocab, self._mask_id = len(tokenizer), self.canvases.mask_id
        self._context, self._chain = context, chain
        self._towns = torch.tensor([tokenizer.convert_tokens_to_ids(f" {town}") for town in relay.TOWNS])

    def questions(self, count: int, settings: relay.RelaySettings) -> NoisyBatch:
        """Returns `count` canvases with one question each. The window is the response, or what is left of it."""
        made = self.canvases.questions(count, settings)
        stop = made.clean.shape[1]
        return self._noised(made, stop - relay.HOPS, stop)

    def leg(self, count: int, settings: relay.RelaySettings, number: int) -> NoisyBatch:
        """Returns `count` canvases whose window is the leg of this number, counted from 0."""
        made = self.canvases.questions(count, settings, hop=number * relay.LEG)
        start = made.clean.shape[1] - relay.HOPS + number * relay.LEG
        return self._noised(made, start, start + relay.LEG, whole=True)

    def recitations(self, count: int, rows: int) -> NoisyBatch:
        """Returns `count` canvases that repeat the rows in another sequence."""
        made = self.canvases.recitations(count, rows)
        return self._noised(made, int(made.masked.int().argmax(1).min()), made.clean.shape[1])

    def noise(self, count: int, length: int) -> Tensor:
        """Tokens [count, length], uniform over the vocabulary without the mask."""
        drawn = self._integers(self._vocab - 1, count, length)
        return drawn + (drawn >= self._mask_id)

    def _noised(self, made: Batch, start: int, stop: int, *, whole: bool = False) -> NoisyBatch:
        """Returns these canvases with noise for the masks of a window, and behind it.

        Unless the window is `whole`, some of what stands in it before the first mask counts as completed.
        """
        count, length = made.clean.shape
        place, steps = torch.arange(length), None
        inside = (place >= start) & (place < stop)
        wrong = made.masked & inside
        wrong[:, stop - 1] |= ~wrong.any(1)
        begin = torch.full((count,), start)
        mistaken = torch.zeros(count, 1, dtype=torch.bool)
        if self._chain is not None:
            steps = 1 + self._integers(len(self._chain.clean) - 1, count)
            level = 1 - self._chain.clean[steps][:, None].float()
            wrong = inside & (torch.rand(count, length, generator=self._generator) < level)
        elif not whole:
            right = wrong.int().argmax(1) - start
            begin += (torch.rand(count, generator=self._generator) * (right + 1)).long()
        if self._chain is None:
            mistaken = torch.rand(count, 1, generator=self._generator) < self.mistaken
        towns, noise = self._towns[self._integers(len(self._towns), count, length)], self.noise(count, length)
        tokens = torch.where(wrong, torch.where(mistaken, towns, noise), made.clean)
        tokens = torch.where(place >= stop, noise, tokens)
        noisy = place >= begin[:, None]
        room = min(TRAILING, self._context - length)
        trailing = int(self._integers(room + 1, 1)) if int(self._integers(2, 1)) else 0
        return NoisyBatch(
            tokens=torch.cat([tokens, self.noise(count, trailing)], dim=1),
            noisy=torch.cat([noisy, torch.ones(count, trailing, dtype=torch.bool)], dim=1),
            window=noisy & (place < stop),
            wrong=wrong,
            known=wrong & ~wrong.roll(1, dims=1),
            made=made,
            steps=steps,
        )

    def _integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self._generator)
