"""Selection against the rules of SEMANTICS 2.1 and 2.6, one candidate at a time."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from remask.denoising.rules import RULES, BlockFacts, Knobs, Step
from remask.denoising.select import above, by_entropy, by_factor, top, within_budget

# Sixteenths are exact in float32, so limits are met exactly and ties are frequent.
LEVELS = st.integers(0, 16).map(lambda n: n / 16)
CONFIDENCES = st.lists(LEVELS, min_size=1, max_size=9).map(lambda values: np.array(values, dtype=np.float32))


def ranks(confidence: NDArray[np.float32]) -> list[int]:
    return sorted(range(len(confidence)), key=lambda i: (-float(confidence[i]), i))


@given(CONFIDENCES, st.integers(0, 12))
def test_top(confidence: NDArray[np.float32], count: int) -> None:
    assert top(confidence, count).tolist() == sorted(ranks(confidence)[:count])


@given(CONFIDENCES, LEVELS)
def test_above(confidence: NDArray[np.float32], threshold: float) -> None:
    order = ranks(confidence)
    expected = [i for n, i in enumerate(order) if n == 0 or confidence[i] >= threshold]
    assert above(confidence, threshold).tolist() == sorted(expected)


def naive_factor(confidence: NDArray[np.float32], factor: float) -> list[int]:
    order = ranks(confidence)
    count = len(order)
    accepted = count
    for n in range(2, count + 1):
        if float(confidence[order[n - 1]]) < 1 - factor / (n + 1):
            accepted = n - 1
            break
    if accepted == count - 1:  # the first failure is at the very last rank
        accepted = count
    return sorted(order[:accepted])


@given(CONFIDENCES, st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2, 3, 10]))
def test_by_factor(confidence: NDArray[np.float32], factor: float) -> None:
    assert by_factor(confidence, factor).tolist() == naive_factor(confidence, factor)


@pytest.mark.parametrize(
    ("confidence", "factor", "expected"),
    [
        ([0.1], 0.0, [0]),
        ([0.9, 0.1], 0.0, [0, 1]),  # two remaining candidates always go together
        ([0.9, 0.1, 0.1], 0.0, [0]),
        ([1.0, 1.0, 0.1], 0.0, [0, 1, 2]),  # a first failure at the last rank does not stop the rule
        ([1.0, 1.0, 0.1, 0.1], 0.0, [0, 1]),
        ([0.1, 0.2, 0.3], 10.0, [0, 1, 2]),
        ([0.2, 0.75, 0.9, 0.5], 1.0, [1, 2]),  # 0.75 >= 2/3; 0.5 < 3/4
    ],
)
def test_the_last_ranks_quirk(confidence: list[float], factor: float, expected: list[int]) -> None:
    assert by_factor(np.array(confidence, dtype=np.float32), factor).tolist() == expected


@given(CONFIDENCES, LEVELS, st.integers(1, 12))
def test_within_budget(confidence: NDArray[np.float32], threshold: float, considered: int) -> None:
    looked_at = ranks(confidence)[:considered]
    expected = [i for n, i in enumerate(looked_at) if n == 0 or confidence[i] >= threshold]
    assert within_budget(confidence, threshold, considered).tolist() == sorted(expected)


# Masks and steps of a block, and pass by pass the confidences of what is open, and what is chosen of them.
BUDGETS: list[tuple[int, int, list[tuple[list[float], list[int]]]]] = [
    (6, 3, [([0.9, 0.1, 0.2, 0.3, 0.1, 0.1], [0]),  # looks at two, and leaves one over
            ([0.6, 0.7, 0.8, 0.9, 0.9], [2, 3, 4]),  # so this one looks at three
            ([0.1, 0.2], [1]),
            ([0.1], [0])]),  # what the last one leaves over gets a pass of its own
    (6, 3, [([0.9, 0.8, 0.7, 0.6, 0.6, 0.6], [0, 1]),
            ([0.6, 0.6, 0.6, 0.9], [0, 3]),  # nothing was left over: the most confident two, the first of equal ones
            ([0.3, 0.4], [1]),
            ([0.9], [0])]),
    (6, 3, [([0.1, 0.2, 0.3, 0.4, 0.4, 0.1], [3]),
            ([0.1, 0.2, 0.3, 0.4, 0.1], [3]),  # looks at three, and leaves two over
            ([0.9, 0.8, 0.7, 0.6], [0, 1, 2, 3])]),
    (4, 1, [([0.4, 0.3, 0.2, 0.1], [0]), ([0.9, 0.1, 0.9], [0, 2]), ([0.1], [0])]),
]  # fmt: skip


@pytest.mark.parametrize(("masks", "steps", "passes"), BUDGETS)
def test_what_a_pass_leaves_of_its_budget_is_the_next_ones(
    masks: int, steps: int, passes: list[tuple[list[float], list[int]]]
) -> None:
    """Fast-dLLM's rule for Dream (`_WithinBudget`), worked out by hand with a threshold of one half."""
    begin = RULES.get("confidence_threshold").begin
    assert begin is not None
    choose = begin(BlockFacts(masks, steps, Knobs(threshold=0.5)))
    for number, (confidence, chosen) in enumerate(passes):
        positions = np.arange(len(confidence))
        step = Step(positions, np.array(confidence, dtype=np.float32), number, 0, None, None, np.zeros)
        assert choose(step).tolist() == chosen, number


@pytest.mark.parametrize(
    "rule",
    [
        lambda c: top(c, 3),
        lambda c: above(c, 0.5),
        lambda c: by_factor(c, 1.0),
        lambda c: within_budget(c, 0.5, 3),
    ],
)
@given(CONFIDENCES)
def test_confidences_are_not_changed(
    rule: Callable[[NDArray[np.float32]], NDArray[np.int64]], confidence: NDArray[np.float32]
) -> None:
    before = confidence.copy()
    rule(confidence)
    assert np.array_equal(confidence, before)


@given(st.lists(st.integers(0, 40).map(lambda n: n / 16), min_size=1, max_size=9), st.integers(0, 60))
def test_entropy_bounded(entropies: list[float], bound: int) -> None:
    order = sorted(range(len(entropies)), key=lambda index: (entropies[index], index))
    expected, total = order[:1], entropies[order[0]]
    for index in order[1:]:
        total += entropies[index]
        if total >= bound / 16:
            break
        expected.append(index)
    chosen = by_entropy(np.array(entropies, dtype=np.float32), bound / 16)
    assert chosen.tolist() == sorted(expected)
