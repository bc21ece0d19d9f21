"""Self-correction of a complete response of uniform diffusion (GIDD): it replaces unlikely tokens, adding no noise."""

import numpy as np
from numpy.typing import NDArray

from remask.core import select
from remask.core.plan import Mask
from remask.sampling.decoder import Confidence, Positions, Tokens

TEMPERATURE = 0.1  # the published code's default


class Correction:
    """The correction of the response positions in `scope`, in progress.

    Every pass proposes a token for each position that it predicts. Of the positions whose proposal differs from what
    stands there, those with the most probable proposals take them. Positions that a pass leaves out keep the proposal
    of the pass before. Where no proposal differs, the next pass has to predict all of `scope`. If no proposal of that
    pass differs either, the response is a fixed point, and the correction ends.
    """

    def __init__(self, scope: range, limit: int, per_step: int, tokens: int | None = None) -> None:
        """Begin a correction of at most `limit` steps, each of up to `per_step` changes.

        `tokens` of the scope may change, those that a pass predicts; by default all of them.
        """
        self.scope, self.steps, self.finished = scope, 0, False
        self.changed: Positions = np.empty(0, dtype=np.int64)
        self._limit, self._per_step = limit, per_step
        self._open = len(scope) if tokens is None else tokens
        self._tokens: Tokens = np.zeros(len(scope), dtype=np.int64)
        self._scores: NDArray[np.float32] = np.zeros(len(scope), dtype=np.float32)

    def choose(self, current: Tokens, positions: Positions, tokens: Tokens, scores: Confidence) -> Positions:
        """Return the positions that take their proposals now, ascending, never more than `per_step`.

        `current` are the tokens of `scope`; the pass proposes `tokens` at `positions`, of probability `scores`.
        """
        at = positions - self.scope.start
        self._tokens[at], self._scores[at] = tokens, scores
        gains = np.where(self._tokens != current, self._scores, np.float32(0))
        chosen = select.top(gains, self._per_step)
        self.changed = self.scope.start + chosen[gains[chosen] > 0]
        self.steps += 1
        nothing_left = not len(self.changed) and len(positions) == self._open
        self.finished = self.steps == self._limit or nothing_left
        return self.changed

    def touched(self, block: int, length: int) -> Mask:
        """Return the blocks of `block` positions that the last step changed, bool [length]."""
        blocks = (np.arange(length) - self.scope.start) // block
        mask: Mask = np.isin(blocks, (self.changed - self.scope.start) // block)
        return mask
