"""Self-correction of a complete response of uniform diffusion (GIDD): it replaces unlikely tokens, adding no noise."""

import numpy as np
from numpy.typing import NDArray

from remask.denoising import select
from remask.plan.spans import Mask
from remask.sampling.decoder import Confidence, Positions, Tokens

TEMPERATURE = 0.1  # the published code's default
PATIENCE = 32  # the published code's default


class Correction:
    """The correction of the response positions in `scope`, in progress.

    Every pass proposes a token for each position that it predicts. Of the positions whose proposal differs from their
    token, those with the most probable proposals take them. Positions that a pass leaves out keep their last proposal.
    If no proposal differs, the next pass must predict all of `scope`. If none of that pass differs either, the response
    is a fixed point, and the correction ends. It also ends once the number of tokens that are the argmax of their row
    has not grown for `patience` steps (GIDD's published code).

    Attributes:
        scope: the positions of the response.
        steps: correction steps so far.
        finished: whether the correction has ended.
        changed: the positions that the last step changed, int64, ascending.
    """

    def __init__(
        self, scope: range, limit: int, per_step: int, patience: int = 0, open_count: int | None = None
    ) -> None:
        """Begin a correction of at most `limit` steps of up to `per_step` changes each. Patience 0 is unlimited.

        `open_count` is the number of positions of `scope` that may change; a full pass predicts all of these. None:
        all.
        """
        self.scope = scope
        self.steps = 0
        self.finished = False
        self.changed: Positions = np.empty(0, dtype=np.int64)
        self._limit = limit
        self._per_step = per_step
        self._open_count = len(scope) if open_count is None else open_count
        self._patience = patience
        self._stagnant_steps = 0  # steps since the number of argmax tokens grew
        self._max_argmax_count = -1
        self._argmax_tokens: Tokens = np.full(len(scope), -1, dtype=np.int64)
        self._tokens: Tokens = np.zeros(len(scope), dtype=np.int64)
        self._scores: NDArray[np.float32] = np.zeros(len(scope), dtype=np.float32)

    def choose(self, current: Tokens, positions: Positions, tokens: Tokens, scores: Confidence) -> Positions:
        """Record a step. Returns the positions that take their proposals now, int64, ascending, at most `per_step`.

        Sets `steps`, `changed` and `finished`. `current` are the tokens of `scope`; the pass proposes `tokens` at
        `positions`, with probabilities `scores`.
        """
        index = positions - self.scope.start
        self._tokens[index] = tokens
        self._scores[index] = scores
        gains = np.where(self._tokens != current, self._scores, np.float32(0))
        chosen = select.top(gains, self._per_step)
        self.changed = self.scope.start + chosen[gains[chosen] > 0]
        self.steps += 1
        is_fixed_point = not len(self.changed) and len(positions) == self._open_count
        self.finished = self.steps == self._limit or is_fixed_point or self._count_stagnation(current)
        return self.changed

    def record_argmax(self, positions: Positions, argmax_tokens: Tokens) -> None:
        """Record the argmax of each of `positions`; call it before `choose`. Others keep that of an earlier pass."""
        self._argmax_tokens[positions - self.scope.start] = argmax_tokens

    def _count_stagnation(self, current: Tokens) -> bool:
        """Count this step. Returns whether the number of argmax tokens has not grown for `patience` steps."""
        if not self._patience:
            return False
        changed = self.changed - self.scope.start
        new_tokens = current.copy()
        new_tokens[changed] = self._tokens[changed]
        argmax_count = int((new_tokens == self._argmax_tokens).sum())
        self._stagnant_steps = 0 if argmax_count > self._max_argmax_count else self._stagnant_steps + 1
        self._max_argmax_count = max(self._max_argmax_count, argmax_count)
        return self._stagnant_steps >= self._patience

    def proposals(self, positions: Positions) -> Tokens:
        """Return the last proposals for `positions`."""
        return self._tokens[positions - self.scope.start]

    def changed_blocks(self, block_length: int, length: int) -> Mask:
        """Return the positions of the blocks of length `block_length` that the last step changed, bool [length]."""
        block_index = (np.arange(length) - self.scope.start) // block_length
        mask: Mask = np.isin(block_index, (self.changed - self.scope.start) // block_length)
        return mask
