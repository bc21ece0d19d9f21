"""Finite automata over tokens, and the most probable path through one: DINGO (arXiv 2505.23061).

Tokens with equal transitions from every state form a class. All tables are by class, so that their size does not depend
on the vocabulary's.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remask.errors import ConstraintError

FREE = -1
"""Stands for a token where the position may have any token."""

States = NDArray[np.bool_]  # [S]


@dataclass(eq=False)
class TokenAutomaton:
    """A deterministic automaton over tokens.

    Attributes:
        classes: the class of each token, int64 [V]; class 0 has the tokens without any transition.
        source, label, target: state, token class and next state of every transition, int64 [E].
        start: the state before the first token.
        accepting: whether the tokens up to a state are a complete answer, bool [S].
    """

    classes: NDArray[np.int64]
    source: NDArray[np.int64]
    label: NDArray[np.int64]
    target: NDArray[np.int64]
    start: int
    accepting: States
    _live_states: list[States] = field(default_factory=list)
    _pairs: NDArray[np.int64] = field(init=False)  # source and label of each transition as one number, ascending
    _by_pair: NDArray[np.int64] = field(init=False)  # the indices of the transitions in that order

    def __post_init__(self) -> None:
        """Sort the transitions by target, which replaces the three arrays, and number the states for `best_path`."""
        order = np.argsort(self.target, kind="stable")
        self.source, self.label, self.target = self.source[order], self.label[order], self.target[order]
        targets, self._first = np.unique(self.target, return_index=True)
        # Ranks of states: those that are targets of transitions come first, so that their scores are one slice.
        self._order = np.append(targets, np.setdiff1d(np.arange(self.state_count), targets))
        self._rank = np.empty(self.state_count, dtype=np.int64)
        self._rank[self._order] = np.arange(self.state_count)
        self._source_ranks = self._rank[self.source]
        self._groups = list(zip(self._first.tolist(), [*self._first[1:].tolist(), len(self.target)], strict=True))
        self._source_rank_list: list[int] = self._source_ranks.tolist()
        pairs = self.source * self.class_count + self.label
        self._by_pair = np.argsort(pairs)
        self._pairs = pairs[self._by_pair]
        self._live_states.append(self.accepting)

    @property
    def state_count(self) -> int:
        """Number of states."""
        return len(self.accepting)

    @property
    def transition_count(self) -> int:
        """Number of transitions. The time of `best_path` grows with it, and with the length of the path."""
        return len(self.source)

    @cached_property
    def class_count(self) -> int:
        """Number of classes of tokens."""
        return int(self.classes.max(initial=0)) + 1

    def live_states(self, remaining: int) -> States:
        """Whether exactly `remaining` further tokens can lead from a state to an accepting one, bool [S]."""
        by_count = self._live_states
        while (count := len(by_count)) <= remaining:
            if count > 1 and np.array_equal(by_count[count - 1], by_count[count - 2]):
                return by_count[count - 1]  # a fixed point: all larger counts have the same states
            predecessors = np.zeros(self.state_count, dtype=np.bool_)
            predecessors[self.source[by_count[count - 1][self.target]]] = True
            # Not appended: another thread may have put an equal entry at this index by now.
            by_count[count : count + 1] = [predecessors]
        return by_count[remaining]

    def min_length(self, limit: int) -> int | None:
        """The smallest number of tokens of a complete answer; None if it is larger than `limit`."""
        return next((count for count in range(limit + 1) if self.live_states(count)[self.start]), None)

    def state_after(self, tokens: Sequence[int] | NDArray[np.int64]) -> int:
        """Return the state after `tokens`. Raises `ConstraintError` if no answer begins with them."""
        state = self.start
        for token in np.asarray(tokens, dtype=np.int64).tolist():
            next_state = self.next_state(state, token)
            if next_state is None:
                raise ConstraintError("settled tokens are no beginning of an answer of the form that was asked for")
            state = next_state
        return state

    def next_state(self, state: int, token: int) -> int | None:
        """Return the state that `token` leads to from `state`. Returns None if there is no such transition."""
        pair = state * self.class_count + int(self.classes[token])
        index = int(self._pairs.searchsorted(pair))
        if index == len(self._pairs) or self._pairs[index] != pair:
            return None
        return int(self.target[self._by_pair[index]])

    def starting_at(self, state: int) -> "TokenAutomaton":
        """Return this automaton with `state` as its start."""
        other = copy(self)
        other.start = state
        return other

    def best_path(
        self, state: int, scores: NDArray[np.float32], fixed: NDArray[np.int64], remaining: int
    ) -> NDArray[np.int64]:
        """Return the token classes of n positions whose sum of scores is the largest, int64 [n].

        The path begins in `state`, takes the `fixed` [n] token of a position unless it is `FREE`, and ends in a state
        from which exactly `remaining` further tokens can be accepted. `scores` [n, C] are those of the best token of
        each class. Raises `ConstraintError` if there is no such path: there is one at every step if there was one at
        the first.
        """
        class_scores = scores.astype(np.float64)
        fixed_positions = np.flatnonzero(fixed != FREE)
        class_scores[fixed_positions] = -np.inf
        class_scores[fixed_positions, self.classes[fixed[fixed_positions]]] = 0.0
        # By position and transition: its score, and later the score of the best path that ends with it.
        values = class_scores[:, self.label]
        state_scores = np.full(self.state_count, -np.inf)
        state_scores[self._rank[state]] = 0.0
        next_scores = np.full(self.state_count, -np.inf)
        target_scores = next_scores[: len(self._groups)]  # a view: states that are targets
        for row in values:
            row += state_scores.take(self._source_ranks)
            np.maximum.reduceat(row, self._first, out=target_scores)
            state_scores = next_scores
        final_scores = np.where(self.live_states(remaining)[self._order], state_scores, -np.inf)
        rank = int(final_scores.argmax())
        if final_scores[rank] == -np.inf:
            raise ConstraintError("no answer of the form that was asked for fits what is settled")
        transitions = []
        for row in values[::-1]:
            start, stop = self._groups[rank]
            best = start + int(row[start:stop].argmax())
            transitions.append(best)
            rank = self._source_rank_list[best]
        path: NDArray[np.int64] = self.label[transitions[::-1]] if transitions else np.empty(0, dtype=np.int64)
        return path
