"""What the device chooses is what the host chooses of the same numbers, ties included."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from remask.denoising import select
from remask.denoising.select import RankRule
from remask.engine.canvas_state import TokenBuffer
from remask.sampling.choice import Candidates
from tests.device import device
from tests.engine.executors import NEEDS_TRITON

LEVELS = np.linspace(0, 1, 6, dtype=np.float32)  # few, so that many are equal
RULES = st.one_of(
    st.integers(0, 6).map(RankRule),
    st.sampled_from([*LEVELS.tolist(), 0.3]).map(RankRule.above),
    st.tuples(st.sampled_from([*LEVELS.tolist(), 0.3]), st.integers(1, 3)).map(
        lambda each: RankRule.strictly_above(*each)
    ),
    st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]).map(lambda factor: RankRule(1, factor=factor)),
    st.integers(1, 4).map(lambda count: RankRule(count, changes=True)),
    st.just("known"),
    st.none(),
)


def by_host(rule: RankRule, confidence: NDArray[np.float32]) -> NDArray[np.int64]:
    """By the functions that the host uses, not by ranks."""
    if not len(confidence):
        return np.empty(0, dtype=np.int64)
    if rule.factor is not None:
        return select.by_factor(confidence, rule.factor)
    if rule.threshold == np.inf:
        return select.top(confidence, rule.least)
    sure = np.flatnonzero(confidence >= rule.threshold)
    return sure if len(sure) >= rule.least else select.top(confidence, rule.least)


PLACES = 400  # of the token buffer
ASKED = st.lists(st.tuples(RULES, st.integers(0, 40)), min_size=1, max_size=5)


@NEEDS_TRITON
@given(ASKED, st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_many_requests_at_once_by_a_kernel(asked: list[tuple[RankRule | str | None, int]], seed: int) -> None:
    check_many(asked, seed, kernels=True)


@given(ASKED, st.integers(0, 2**32 - 1))
def test_many_requests_at_once(asked: list[tuple[RankRule | str | None, int]], seed: int) -> None:
    check_many(asked, seed, kernels=False)


def check_many(asked: list[tuple[RankRule | str | None, int]], seed: int, *, kernels: bool) -> None:
    """What is chosen, and what the buffer holds then."""
    rng = np.random.default_rng(seed)
    buffer = TokenBuffer(PLACES, torch.device(device()))
    values = rng.integers(0, 20, PLACES + 1)
    requests, expected, scores, free = list[Candidates](), list[bool](), list[list[float]](), rng.permutation(PLACES)
    after = values.copy()
    for rule, count in asked:
        start = int(rng.integers(0, 20))
        positions = np.sort(rng.choice(np.arange(start, start + 50), count, replace=False))
        block = range(start + int(rng.integers(0, 3)), start + int(rng.integers(30, 60)))
        confidence, token = rng.choice(LEVELS, count), rng.integers(0, 10, count)
        known = positions[rng.random(count) < 0.4]
        chosen = known if rule == "known" else rule
        assert not isinstance(chosen, str)
        places = list[NDArray[np.int64]]()
        for _ in range(rng.integers(1, 3)):  # of one canvas or two
            own, free = free[:count], free[count:]
            places.append(np.zeros(start + 50, dtype=np.int64))
            places[-1][positions] = own
        requests.append(Candidates(chosen, positions, block, places))
        value = values[places[0][positions]]
        rows = np.flatnonzero((value % 2 == 1) & np.isin(positions, block))
        if isinstance(chosen, RankRule):
            best = rows[by_host(chosen, confidence[rows])]
            new = value[best] // 2 != token[best]
            taken = positions[best[new & (confidence[best] > 0)] if chosen.changes else best]
        else:
            taken = known if chosen is not None else positions[:0]
        hit = np.isin(positions, taken)
        for each in places:
            after[each[taken]] = 2 * token[hit] + (isinstance(chosen, RankRule) and chosen.changes)
        expected += hit.tolist()
        scores += [[float(one), float(other)] for one, other in zip(token, confidence, strict=True)]
    buffer.values.copy_(torch.from_numpy(values))
    given = torch.tensor(scores, dtype=torch.float32).reshape(-1, 2).T.contiguous().to(device())
    answer = buffer.transfer(given, requests, kernels=kernels)
    assert torch.equal(answer[:2], given)
    assert answer[2].bool().tolist() == expected
    assert buffer.values[:-1].tolist() == after[:-1].tolist()


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([None, 0.2, 0.6, 1.0]), st.integers(0, 9))
def test_what_is_certain_of_a_choice(count: int, seed: int, threshold: float | None, least: int) -> None:
    """As many as it says are chosen in any case, and where it says that these are all, they are."""
    confidence = np.random.default_rng(seed).choice(LEVELS, count)
    rules = [RankRule(least), RankRule(1, factor=1.0)]
    if threshold is not None:
        rules = [RankRule.above(threshold), RankRule.strictly_above(threshold, max(1, least))]
    for rule in rules:
        chosen = len(by_host(rule, confidence))
        assert chosen >= rule.min_count(count)
        if rule.has_fixed_count(count):
            assert chosen == rule.min_count(count)


def test_a_threshold_is_compared_as_float32() -> None:
    """0.7 is no float32: as the host compares, the next smaller one passes."""
    third = np.float32(0.7)
    below = np.nextafter(third, np.float32(0))
    assert RankRule.above(0.7).threshold == third
    assert RankRule.strictly_above(0.7, 1).threshold > third
    rows = np.array([third, below], dtype=np.float32)
    assert (rows >= RankRule.above(0.7).threshold).tolist() == (rows >= 0.7).tolist()
    assert (rows >= RankRule.strictly_above(0.7, 1).threshold).tolist() == (rows > 0.7).tolist()
