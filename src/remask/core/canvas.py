"""A request's whole token sequence, and which of its positions are final."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from remask.core.plan import NEVER, Mask


class Canvas:
    """A prompt, then positions to be denoised: the response, and the rest of the model's canvas.

    `noisy` says which positions are not final. It is never inferred from `token == mask_id`, because a prompt may
    contain the mask token as text.
    """

    def __init__(self, prompt: Sequence[int], noise: Sequence[int] | NDArray[np.int64], response: int) -> None:
        """`noise` holds the tokens after the prompt. The first `response` of them belong to the response."""
        self.prompt, self.end = len(prompt), len(prompt) + response
        self.tokens: NDArray[np.int64] = np.concatenate(
            [np.asarray(prompt, dtype=np.int64), np.asarray(noise, dtype=np.int64)]
        )
        self.noisy: Mask = np.arange(len(self.tokens)) >= self.prompt
        self.settled: NDArray[np.int32] = np.where(self.noisy, NEVER, -1).astype(np.int32)
        self._lead = 0

    @classmethod
    def masked(cls, prompt: Sequence[int], response: int, mask_id: int) -> "Canvas":
        """A prompt and `response` masks."""
        return cls(prompt, [mask_id] * response, response)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def response(self) -> NDArray[np.int64]:
        """The response's tokens, noise included; a view of the canvas."""
        return self.tokens[self.prompt : self.end]

    @property
    def settled_lead(self) -> int:
        """Number of response positions, counted from the first one, that are final with no gap between them."""
        begin = self.prompt + self._lead
        if begin < self.end and not self.noisy[begin]:  # it never falls, so the search goes on where it ended
            rest = self.noisy[begin : self.end]
            self._lead += int(rest.argmax()) or len(rest)
        return self._lead

    def write(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Put tokens at noisy positions, which stay noisy."""
        self.tokens[positions] = tokens

    def settle(self, positions: NDArray[np.int64], step: int) -> None:
        """Make positions final at the end of `step`, with the tokens that they have. Final ones stay as they are."""
        fresh = positions[self.noisy[positions]]
        self.noisy[fresh] = False
        self.settled[fresh] = step
