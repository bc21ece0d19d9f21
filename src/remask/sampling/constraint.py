"""Answers of a given form: what the sampler chooses lies on a path of an automaton that can still be completed.

The device reads the best token of each class of tokens; the host finds the path and hands its tokens to the rule, which
chooses positions as ever. All of a path can be completed by the rest of it, so any choice of positions can be.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.canvas import Canvas
from remask.sampling.automaton import FREE, TokenAutomaton
from remask.sampling.logprobs import width
from remask.sending import send

FILTERED = 1e4
"""What a token loses that top-k or top-p would leave out: it is taken where no other one completes an answer."""


class ClassTable:
    """The class of each token, int64 [V], on whichever device asks, and the number of classes."""

    def __init__(self, classes: NDArray[np.int64], count: int) -> None:
        self.count = count
        self._classes = torch.from_numpy(classes)
        self._on: dict[torch.device, Tensor] = {}

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of `scores` [rows, V] in each class and the token that has it, each [rows, C].

        Of equal ones the first token. Where all of a class are -inf, the token is 0.
        """
        rows, vocab = scores.shape
        if scores.device not in self._on:
            self._on[scores.device] = send(self._classes.numpy(), scores.device)
        at = self._on[scores.device].expand(rows, vocab)
        best = scores.new_full((rows, self.count), -torch.inf).scatter_reduce_(1, at, scores, "amax")
        ids = torch.arange(vocab, device=scores.device).expand(rows, vocab)
        wins = (scores == best.gather(1, at)) & (scores > -torch.inf)
        first = torch.where(wins, ids, vocab)
        tokens = torch.full((rows, self.count), vocab, device=scores.device).scatter_reduce_(1, at, first, "amin")
        return best, torch.where(tokens == vocab, 0, tokens)


class Constraint:
    """The form of responses. It holds nothing of a request, so many can have one."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.table = ClassTable(automaton.classes, automaton.labels)

    @property
    def width(self) -> int:
        """Numbers a row that it needs: score, token, confidence and log-probability of the best token of each class."""
        return 4 * self.table.count

    def choose(
        self,
        canvas: Canvas,
        scope: range,
        block: range,
        positions: NDArray[np.int64],
        read: NDArray[np.float32],
        top: int | None,
    ) -> NDArray[np.float32]:
        """Return `read` [n, rows] with the path's tokens, confidences and log-probabilities in the first rows.

        `read` holds what the device answered at `positions`: token, confidence and the log-probabilities of a request
        that asks for `top` of them, then what this constraint needs. The positions in `scope` have the form; those
        outside of it and of `block` stay as they are.
        """
        count, own = self.table.count, 2 + width(top, len(self.automaton.classes))
        scores, tokens, confidences, logprobs = read[own : own + self.width].reshape(4, count, -1)
        begin, stop = max(block.start, scope.start), min(block.stop, scope.stop)
        if begin >= stop:
            return read
        state = self.automaton.after(canvas.tokens[scope.start : begin])
        fixed = np.where(canvas.noisy[begin:stop], FREE, canvas.tokens[begin:stop])
        offered = np.zeros((stop - begin, count), dtype=np.float32)
        inside = np.flatnonzero((positions >= begin) & (positions < stop))
        offered[positions[inside] - begin] = scores[:, inside].T
        path = self.automaton.best_path(state, offered, fixed, scope.stop - stop)
        chosen = path[positions[inside] - begin]
        out = read.copy()
        out[0, inside], out[1, inside] = tokens[chosen, inside], confidences[chosen, inside]
        if own > 2:
            out[2, inside] = logprobs[chosen, inside]
        return out
