"""A request's whole token sequence, and which of its positions are final."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from remask.core.plan import NEVER, Mask


class Canvas:
    """Prompt followed by response positions still to be denoised.

    Whether a position is noisy is state of its own, never inferred from `token == mask_id`: a prompt may contain the
    mask token as text.
    """

    def __init__(self, prompt: Sequence[int], response: int, mask_id: int) -> None:
        self.prompt = len(prompt)
        self.tokens: NDArray[np.int64] = np.concatenate(
            [np.asarray(prompt, dtype=np.int64), np.full(response, mask_id, dtype=np.int64)]
        )
        self.noisy: Mask = np.arange(len(self.tokens)) >= self.prompt
        self.settled: NDArray[np.int32] = np.where(self.noisy, NEVER, -1).astype(np.int32)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def response(self) -> NDArray[np.int64]:
        """The response's tokens, masks included; a view of the canvas."""
        return self.tokens[self.prompt :]

    @property
    def settled_lead(self) -> int:
        """How many response positions are final without a gap, from the first."""
        noisy = self.noisy[self.prompt :]
        return int(noisy.argmax()) if noisy.any() else len(noisy)

    def transfer(self, positions: NDArray[np.int64], tokens: NDArray[np.int64], step: int) -> None:
        """Make noisy positions final at the end of `step`. Changes nothing else."""
        self.tokens[positions] = tokens
        self.noisy[positions] = False
        self.settled[positions] = step
