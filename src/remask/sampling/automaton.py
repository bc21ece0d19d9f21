"""Finite automata over tokens, and the most probable path through one: DINGO (arXiv 2505.23061).

Tokens that lead to the same states from every state form a class. All tables are by class, so that their size does not
depend on the vocabulary's.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remask.errors import ConstraintError

FREE = -1
"""In place of a token: the position may have any token."""

States = NDArray[np.bool_]  # [S]


@dataclass(eq=False)
class TokenAutomaton:
    """A deterministic automaton over tokens.

    Attributes:
        classes: the class of each token, int64 [V]; 0 is that of tokens which no state takes.
        source, label, target: the transitions: from which state a token of which class leads where, int64 [E].
        start: the state before the first token.
        accepting: the states in which the tokens so far are a whole answer, bool [S].
    """

    classes: NDArray[np.int64]
    source: NDArray[np.int64]
    label: NDArray[np.int64]
    target: NDArray[np.int64]
    start: int
    accepting: States
    _alive: list[States] = field(default_factory=list)
    _pairs: NDArray[np.int64] = field(init=False)  # state and class of each transition as one number, ascending
    _by_pair: NDArray[np.int64] = field(init=False)  # the transitions in that order

    def __post_init__(self) -> None:
        order = np.argsort(self.target, kind="stable")
        self.source, self.label, self.target = self.source[order], self.label[order], self.target[order]
        targets, self._first = np.unique(self.target, return_index=True)
        # A path goes over states in an order of their own: those that transitions lead to, and then the others.
        self._order = np.append(targets, np.setdiff1d(np.arange(self.states), targets))
        self._place = np.empty(self.states, dtype=np.int64)
        self._place[self._order] = np.arange(self.states)
        self._from = self._place[self.source]
        self._groups = list(zip(self._first.tolist(), [*self._first[1:].tolist(), len(self.target)], strict=True))
        self._from_list: list[int] = self._from.tolist()
        pairs = self.source * self.labels + self.label
        self._by_pair = np.argsort(pairs)
        self._pairs = pairs[self._by_pair]
        self._alive.append(self.accepting)

    @property
    def states(self) -> int:
        """Number of states."""
        return len(self.accepting)

    @property
    def transitions(self) -> int:
        """Number of transitions, which the time of a path grows with, beside its length."""
        return len(self.source)

    @cached_property
    def labels(self) -> int:
        """Number of classes of tokens."""
        return int(self.classes.max(initial=0)) + 1

    def alive(self, left: int) -> States:
        """The states from which exactly `left` further tokens can end in an accepting one, bool [S]."""
        known = self._alive
        while (count := len(known)) <= left:
            if count > 1 and np.array_equal(known[count - 1], known[count - 2]):
                return known[count - 1]  # and so for every larger number
            before = np.zeros(self.states, dtype=np.bool_)
            before[self.source[known[count - 1][self.target]]] = True
            # At its own place, not at the end: another thread may have put an equal one there by now.
            known[count : count + 1] = [before]
        return known[left]

    def shortest(self, most: int) -> int | None:
        """The smallest number of tokens, up to `most`, that make a whole answer; None: no such number."""
        return next((count for count in range(most + 1) if self.alive(count)[self.start]), None)

    def after(self, tokens: Sequence[int] | NDArray[np.int64]) -> int:
        """The state after `tokens`. Raises `ConstraintError` where no answer begins with them."""
        state = self.start
        for token in np.asarray(tokens, dtype=np.int64).tolist():
            found = self.step(state, token)
            if found is None:
                raise ConstraintError("settled tokens are no beginning of an answer of the form that was asked for")
            state = found
        return state

    def step(self, state: int, token: int) -> int | None:
        """The state that `token` leads to from `state`; None where it leads nowhere."""
        pair = state * self.labels + int(self.classes[token])
        place = int(self._pairs.searchsorted(pair))
        if place == len(self._pairs) or self._pairs[place] != pair:
            return None
        return int(self.target[self._by_pair[place]])

    def begun(self, state: int) -> "TokenAutomaton":
        """The same automaton, in `state` before the first token."""
        other = copy(self)
        other.start = state
        return other

    def best_path(
        self, state: int, scores: NDArray[np.float32], fixed: NDArray[np.int64], left: int
    ) -> NDArray[np.int64]:
        """The classes of the tokens of n positions, int64 [n], whose sum of scores is the largest.

        The path begins in `state`, takes the `fixed` [n] token where there is one (else `FREE`), and ends in a state
        from which exactly `left` further tokens can be accepted. `scores` [n, C] are those of the best token of each
        class.
        Raises `ConstraintError` where there is no such path: there is one at every step if there was one at the first.
        """
        offered = scores.astype(np.float64)
        held = np.flatnonzero(fixed != FREE)
        offered[held] = -np.inf
        offered[held, self.classes[fixed[held]]] = 0.0
        values = offered[:, self.label]  # of each transition at each position; then of the best path that ends with it
        before = np.full(self.states, -np.inf)
        before[self._place[state]] = 0.0
        reached = np.full(self.states, -np.inf)
        entered = reached[: len(self._groups)]
        for row in values:
            row += before.take(self._from)
            np.maximum.reduceat(row, self._first, out=entered)
            before = reached
        last = np.where(self.alive(left)[self._order], before, -np.inf)
        at = int(last.argmax())
        if last[at] == -np.inf:
            raise ConstraintError("no answer of the form that was asked for fits what is settled")
        taken = []
        for row in values[::-1]:
            begin, stop = self._groups[at]
            best = begin + int(row[begin:stop].argmax())
            taken.append(best)
            at = self._from_list[best]
        path: NDArray[np.int64] = self.label[taken[::-1]] if taken else np.empty(0, dtype=np.int64)
        return path
