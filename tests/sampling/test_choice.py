"""What the device chooses is what the host chooses of the same numbers, ties included."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from remask.remasking import select
from remask.remasking.select import Ranked
from remask.sampling.choice import Candidates, Choice

CPU = torch.device("cpu")
LEVELS = np.linspace(0, 1, 6, dtype=np.float32)  # few, so that many are equal
RULES = st.one_of(
    st.integers(0, 6).map(Ranked),
    st.sampled_from([*LEVELS.tolist(), 0.3]).map(Ranked.above),
    st.tuples(st.sampled_from([*LEVELS.tolist(), 0.3]), st.integers(1, 3)).map(lambda each: Ranked.beyond(*each)),
    st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]).map(lambda factor: Ranked(1, factor=factor)),
    st.integers(1, 4).map(lambda count: Ranked(count, changes=True)),
    st.just("known"),
    st.none(),
)


def by_host(rule: Ranked, confidence: NDArray[np.float32]) -> NDArray[np.int64]:
    """By the functions that the host uses, not by ranks."""
    if not len(confidence):
        return np.empty(0, dtype=np.int64)
    if rule.factor is not None:
        return select.by_factor(confidence, rule.factor)
    if rule.threshold == np.inf:
        return select.top(confidence, rule.least)
    sure = np.flatnonzero(confidence >= rule.threshold)
    return sure if len(sure) >= rule.least else select.top(confidence, rule.least)


@given(st.lists(st.tuples(RULES, st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_many_requests_at_once(asked: list[tuple[Ranked | str | None, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests, expected, scores, flags = list[Candidates](), list[bool](), list[float](), list[bool]()
    changed = list[bool]()
    for rule, count in asked:
        start = int(rng.integers(0, 20))
        positions = np.sort(rng.choice(np.arange(start, start + 12), count, replace=False))
        block = range(start + int(rng.integers(0, 3)), start + int(rng.integers(6, 12)))
        confidence, noisy = rng.choice(LEVELS, count), rng.random(count) < 0.7
        known = positions[rng.random(count) < 0.4]
        chosen = known if rule == "known" else rule
        assert not isinstance(chosen, str)
        places = [rng.permutation(40), rng.permutation(40)][: rng.integers(1, 3)]
        requests.append(Candidates(chosen, positions, block, places))
        rows = np.flatnonzero(noisy & np.isin(positions, block))
        new = rng.random(count) < 0.5
        if isinstance(chosen, Ranked):
            best = rows[by_host(chosen, confidence[rows])]
            taken = positions[best[new[best] & (confidence[best] > 0)] if chosen.changes else best]
        else:
            taken = known if chosen is not None else positions[:0]
        expected += np.isin(positions, taken).tolist()
        scores += confidence.tolist()
        flags += noisy.tolist()
        changed += new.tolist()
    choice = Choice.of(requests, CPU)
    numbers = torch.tensor(scores, dtype=torch.float32)
    found = choice.choose(numbers, *(torch.tensor(each, dtype=torch.bool) for each in (flags, changed)))
    assert found.tolist() == expected
    places = [each.places[0][each.positions] for each in requests]
    assert choice.place.tolist() == np.concatenate(places).tolist()
    put = list(zip(choice.rows.tolist(), choice.targets.tolist(), strict=True))
    first = np.cumsum([0, *[each.rows for each in requests]])
    assert put == [
        (start + row, table[position])
        for start, each in zip(first.tolist(), requests, strict=False)
        for table in each.places
        for row, position in enumerate(each.positions.tolist())
    ]


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([None, 0.2, 0.6, 1.0]), st.integers(0, 9))
def test_what_is_certain_of_a_choice(count: int, seed: int, threshold: float | None, least: int) -> None:
    """As many as it says are chosen in any case, and where it says that these are all, they are."""
    confidence = np.random.default_rng(seed).choice(LEVELS, count)
    rules = [Ranked(least), Ranked(1, factor=1.0)]
    if threshold is not None:
        rules = [Ranked.above(threshold), Ranked.beyond(threshold, max(1, least))]
    for rule in rules:
        chosen = len(by_host(rule, confidence))
        assert chosen >= rule.sure(count)
        if rule.counted(count):
            assert chosen == rule.sure(count)


def test_a_threshold_is_compared_as_float32() -> None:
    """0.7 is no float32: as the host compares, the next smaller one passes."""
    third = np.float32(0.7)
    below = np.nextafter(third, np.float32(0))
    assert Ranked.above(0.7).threshold == third
    assert Ranked.beyond(0.7, 1).threshold > third
    rows = np.array([third, below], dtype=np.float32)
    assert (rows >= Ranked.above(0.7).threshold).tolist() == (rows >= 0.7).tolist()
    assert (rows >= Ranked.beyond(0.7, 1).threshold).tolist() == (rows > 0.7).tolist()
