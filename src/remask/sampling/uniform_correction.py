"""Self-correction of a complete response of uniform diffusion (GIDD): it replaces unlikely tokens, adding no noise."""

import numpy as np
from numpy.typing import NDArray

from remask.denoising import select
from remask.plan.spans import Mask
from remask.sampling.decoder import Confidence, Positions, Tokens

TEMPERATURE = 0.1  # the published code's default
PATIENCE = 32  # the same


class Correction:
    """The correction of the response positions in `scope`, in progress.

    Every pass proposes a token for each position that it predicts. Of the positions whose proposal differs from what
    stands there, those with the most probable proposals take them. Positions that a pass leaves out keep the proposal
    of the pass before. Where no proposal differs, the next pass has to predict all of `scope`. If no proposal of that
    pass differs either, the response is a fixed point, and the correction ends. It ends too once the share of the
    tokens that are the argmax of their row has not grown for `patience` steps (GIDD's published code).
    """

    def __init__(self, scope: range, limit: int, per_step: int, patience: int = 0, tokens: int | None = None) -> None:
        """Begin a correction of at most `limit` steps, each of up to `per_step` changes; `patience` 0 has no end.

        `tokens` of the scope may change, those that a pass predicts; by default all of them.
        """
        self.scope, self.steps, self.finished = scope, 0, False
        self.changed: Positions = np.empty(0, dtype=np.int64)
        self._limit, self._per_step = limit, per_step
        self._open = len(scope) if tokens is None else tokens
        self._patience, self._waited, self._most = patience, 0, -1
        self._likeliest: Tokens = np.full(len(scope), -1, dtype=np.int64)
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
        self.finished = self.steps == self._limit or nothing_left or self._stagnates(current)
        return self.changed

    def note(self, positions: Positions, likeliest: Tokens) -> None:
        """Take the argmax of each of `positions`, whose proposals come next. Others keep that of an earlier pass."""
        self._likeliest[positions - self.scope.start] = likeliest

    def _stagnates(self, current: Tokens) -> bool:
        """Whether the step after which `current` is changed was one too many without a larger share of argmaxes."""
        if not self._patience:
            return False
        after, changed = current.copy(), self.changed - self.scope.start
        after[changed] = self._tokens[changed]
        right = int((after == self._likeliest).sum())
        self._waited = 0 if right > self._most else self._waited + 1
        self._most = max(self._most, right)
        return self._waited >= self._patience

    def proposals(self, positions: Positions) -> Tokens:
        """Return the tokens that were last proposed at `positions`."""
        return self._tokens[positions - self.scope.start]

    def touched(self, block: int, length: int) -> Mask:
        """Return the blocks of `block` positions that the last step changed, bool [length]."""
        blocks = (np.arange(length) - self.scope.start) // block
        mask: Mask = np.isin(blocks, (self.changed - self.scope.start) // block)
        return mask
