"""The counter-based generator: published vectors, an implementation of its own, and the distribution of its numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remask.sampling.philox import philox, uniform
from tests.oracles import philox as oracle

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


@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_it_is_what_the_paper_says(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    expected = oracle.block(tuple(np.array(word, dtype=np.uint64) for word in counter), key)
    assert [int(word) for word in philox((a, b, c, d), key)] == [int(word) for word in expected]


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


def test_seeds_steps_and_rows_differ() -> None:
    one = uniform(1, 1, torch.arange(4), range(8))
    for other in (
        uniform(2, 1, torch.arange(4), range(8)),
        uniform(1, 2, torch.arange(4), range(8)),
        uniform(1, 1, torch.arange(4, 8), range(8)),
    ):
        assert not (one == other).any()
