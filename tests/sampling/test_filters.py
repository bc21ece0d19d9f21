"""Filters against their definitions; draws against published vectors and an implementation of their own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remask.sampling.filters import Draws, draw, philox, top_k, top_p, uniform
from tests.goldens import uniform as goldens
from tests.oracles import philox as oracle

LOGITS = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0], [0.0, 3.0, 0.0, 0.0, 0.0]])


def kept(logits: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def test_top_k_keeps_ties_of_the_last() -> None:
    assert kept(top_k(LOGITS, 1)) == [[0], [1]]
    assert kept(top_k(LOGITS, 2)) == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert top_k(LOGITS, None) is top_k(LOGITS, 5) is LOGITS


def test_top_p_keeps_the_token_that_crosses() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for share, count in ((0.1, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        assert kept(top_p(shares, share)) == [list(range(count))]
    assert top_p(LOGITS, None) is top_p(LOGITS, 1.0) is LOGITS


def test_recorded_filters() -> None:
    """The original's order for GIDD: temperature, top-k, top-p."""
    logits = goldens.sampling("torch_steps")[1]["filter.logits"].flatten(0, -2)
    found = list(goldens.cases("torch_steps", "filter"))
    assert len(found) == 8
    for case, tensors in found:
        temperature = case["temperature"]
        if temperature == 0:
            continue
        share = top_p(top_k(logits / temperature, case["top_k"] or None), case["top_p"]).softmax(-1)
        torch.testing.assert_close(share, tensors["probs"].flatten(0, -2), rtol=0, atol=1e-5)


def test_inputs_stay_as_they_are() -> None:
    before = LOGITS.clone()
    top_k(LOGITS, 2)
    top_p(LOGITS, 0.5)
    draw(LOGITS, Draws(1))
    assert torch.equal(LOGITS, before)


# philox4x32-10 of the known-answer vectors that come with the paper's library (Random123, kat_vectors).
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
WORD = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    assert [int(word) for word in philox((a, b, c, d), key)] == list(expected)
    assert [
        int(word) for word in oracle.block(tuple(np.array(word, dtype=np.uint64) for word in counter), key)
    ] == list(expected)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 2**31), min_size=1), st.integers(1, 9))
def test_a_number_is_its_seed_step_row_and_column(seed: int, step: int, rows: list[int], columns: int) -> None:
    numbers = uniform(seed, step, torch.tensor(rows), range(columns))
    assert numbers.dtype == torch.float32
    assert numbers.double().tolist() == oracle.uniform(seed, step, rows, columns).tolist()


@pytest.mark.parametrize("columns", [range(1), range(4), range(63), range(4, 64), range(7, 9), range(6, 6)])
def test_a_part_of_the_columns_is_a_part_of_the_numbers(columns: range) -> None:
    rows = torch.arange(5, 9)
    assert torch.equal(uniform(3, 1, rows, columns), uniform(3, 1, rows, range(64))[:, columns.start : columns.stop])


def test_numbers_are_uniform_and_independent_of_their_neighbours() -> None:
    """Chi-square over 64 bins; each expectation is exceeded once in a million times."""
    count, bins = 1 << 18, 64
    numbers = uniform(11, 2, torch.arange(1 << 9), range(1 << 9))
    assert 0 < float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1
    places = (numbers * bins).long()
    alone = torch.bincount(places.flatten(), minlength=bins)
    assert float((alone - count / bins).square().sum() / (count / bins)) < 131  # 63 degrees of freedom
    for other in (places.roll(1, 0), places.roll(1, 1)):
        pairs = torch.bincount((places // 8 * 8 + other // 8).flatten(), minlength=bins)
        assert float((pairs - count / bins).square().sum() / (count / bins)) < 131
