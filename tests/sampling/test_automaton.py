"""Paths of token automata against an enumeration of all token strings."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from remask.answers.structured import automaton_of
from remask.errors import ConstraintError
from remask.readers.constraint import ClassTable
from remask.sampling.automaton import FREE, TokenAutomaton

VOCAB = 6
Table = dict[tuple[int, int], int]  # state and token -> state


def drawn(rng: random.Random, padded: bool) -> tuple[TokenAutomaton, Table, set[int], int]:
    """A random automaton of a few states over five tokens, as tables and as the product's; token 5 is padding."""
    states = rng.randint(1, 4)
    table = {(s, t): rng.randrange(states) for s in range(states) for t in range(5) if rng.random() < 0.5}
    accepting = {s for s in range(states) if rng.random() < 0.5} or {0}
    edges = np.array([(s, t, q) for (s, t), q in table.items()], dtype=np.int64).reshape(-1, 3)
    final, padding = np.array(sorted(accepting)) + 7, (5,) if padded else ()
    made = automaton_of(edges + np.array([7, 0, 7]), 7, final, VOCAB, padding)
    return made, table, accepting, states


def accepted(word: tuple[int, ...], table: Table, accepting: set[int], padded: bool) -> bool:
    """Whether a string is an answer: tokens of the table to an accepting state, then padding to the end."""
    if padded:
        while word and word[-1] == 5:
            word = word[:-1]
    state: int | None = 0
    for token in word:
        state = None if state is None else table.get((state, token))
    return state in accepting


@pytest.mark.parametrize("seed", range(60))
def test_the_best_path_is_the_best_of_all_strings(seed: int) -> None:
    rng = random.Random(seed)
    padded = seed % 2 == 0
    automaton, table, accepting, _ = drawn(rng, padded)
    length = rng.randint(1, 4)
    words = [w for w in itertools.product(range(VOCAB), repeat=length) if accepted(w, table, accepting, padded)]
    assert bool(automaton.live_states(length)[automaton.start]) is bool(words)
    scores = np.random.default_rng(seed).normal(size=(length, VOCAB)).astype(np.float32)
    best = np.full((length, automaton.class_count), -np.inf, dtype=np.float32)
    for token, label in enumerate(automaton.classes):
        best[:, label] = np.maximum(best[:, label], scores[:, token])
    fixed = np.full(length, FREE)
    if words and rng.random() < 0.5:
        place, word = rng.randrange(length), rng.choice(words)
        fixed[place] = word[place]
        words = [w for w in words if w[place] == word[place]]
    left = rng.randint(0, length - 1)  # the last tokens are of later blocks
    free = length - left
    if not words:
        with pytest.raises(ConstraintError):
            automaton.best_path(automaton.start, best[:free], fixed[:free], left)
        return
    if (fixed[free:] != FREE).any():
        return  # later blocks hold nothing yet
    path = automaton.best_path(automaton.start, best[:free], fixed[:free], left)
    totals = {w[:free]: sum(scores[i, t] for i, t in enumerate(w[:free]) if fixed[i] == FREE) for w in words}
    gained = sum(best[i, label] for i, label in enumerate(path) if fixed[i] == FREE)
    assert gained == pytest.approx(max(totals.values()), abs=1e-5)
    for i, token in enumerate(fixed[:free]):
        assert token == FREE or automaton.classes[token] == path[i]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_one_class_lead_alike(seed: int) -> None:
    automaton, table, accepting, states = drawn(random.Random(seed), True)
    for one, other in itertools.product(range(5), repeat=2):
        alike = all(table.get((s, one)) == table.get((s, other)) for s in range(states))
        assert bool(automaton.classes[one] == automaton.classes[other]) is alike
    words = [word for count in range(6) for word in itertools.product(range(5), repeat=count)]
    lengths = [len(word) for word in words if accepted(word, table, accepting, False)]
    assert automaton.min_length(5) == min(lengths, default=None)


class Interrupted(TokenAutomaton):
    """While it computes which states are alive, another thread asks for the same."""

    asked = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "target" and self.asked:
            self.asked, left = 0, self.asked
            self.live_states(left)
        return super().__getattribute__(name)


@pytest.mark.parametrize("left", range(1, 5))
def test_threads_may_ask_at_a_time(left: int) -> None:
    """A form that three tokens complete, and no other number."""
    steps, final = np.arange(3), np.arange(4) == 3
    automaton = Interrupted(np.ones(1, dtype=np.int64), steps, np.ones(3, dtype=np.int64), steps + 1, 0, final)
    automaton.asked = left
    automaton.live_states(left)
    assert [bool(automaton.live_states(count)[0]) for count in range(6)] == [False, False, False, True, False, False]


def test_what_no_answer_begins_with_is_an_error() -> None:
    automaton = automaton_of(np.array([(0, 1, 1)]), 0, np.array([1]), 3)
    assert automaton.state_after([1]) == 1
    with pytest.raises(ConstraintError, match="no beginning of an answer"):
        automaton.state_after([2])


def test_the_best_token_of_each_class() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, -torch.inf, 2.0], [5.0, -1.0, 0.0, -torch.inf, -torch.inf]])
    best, tokens = ClassTable(np.array([0, 1, 1, 2, 0]), 3).best(scores)
    assert best.tolist() == [[2.0, 3.0, -torch.inf], [5.0, 0.0, -torch.inf]]
    assert tokens.tolist() == [[4, 1, 0], [0, 2, 0]]
