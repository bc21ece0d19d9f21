from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from remask.errors import IntegrityError
from remask.store.pages import PageAllocator, PageRange


def claim(allocator: PageAllocator, tokens: int, layers: range) -> PageRange:
    extent = allocator.allocate(tokens, layers)
    assert extent is not None
    return extent


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_are_rounded_up(tokens: int, expected: int) -> None:
    assert PageAllocator(1, 4, page_size=4).pages_for(tokens) == expected


def test_slots_follow_the_pages() -> None:
    extent = PageRange(range(2), np.array([3, 0, 7]), page_size=4, tokens=10)
    assert extent.slots().tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 28, 29]
    below = extent.below(1)
    assert below.layers == range(1)
    assert below.slots().tolist() == extent.slots().tolist()


def test_a_consecutive_run_is_preferred_to_earlier_scattered_pages() -> None:
    allocator = PageAllocator(1, 8, page_size=2)
    singles = [claim(allocator, 2, range(1)) for _ in range(8)]
    for index in (0, 2, 4, 5, 6):
        allocator.release(singles[index])
    assert claim(allocator, 5, range(1)).pages.tolist() == [4, 5, 6]


def test_scattered_pages_are_taken_where_no_run_is_long_enough() -> None:
    allocator = PageAllocator(1, 6, page_size=1)
    singles = [claim(allocator, 1, range(1)) for _ in range(6)]
    for index in (0, 2, 5):
        allocator.release(singles[index])
    assert allocator.allocate(4, range(1)) is None
    assert claim(allocator, 3, range(1)).pages.tolist() == [0, 2, 5]


def test_the_first_run_is_taken() -> None:
    allocator = PageAllocator(1, 4, page_size=1)
    assert claim(allocator, 2, range(1)).pages.tolist() == [0, 1]
    assert claim(allocator, 2, range(1)).pages.tolist() == [2, 3]


def test_layers_are_counted_apart() -> None:
    allocator = PageAllocator(3, 2, page_size=1)
    low, high = claim(allocator, 2, range(1)), claim(allocator, 2, range(1, 3))
    assert low.pages.tolist() == high.pages.tolist() == [0, 1]
    assert allocator.used == 6
    allocator.release(low)
    assert allocator.allocate(1, range(2)) is None
    assert claim(allocator, 1, range(1)).pages.tolist() == [0]


def test_a_refused_claim_changes_nothing() -> None:
    allocator = PageAllocator(2, 3, page_size=4)
    claim(allocator, 8, range(2))
    before = allocator.references.copy()
    assert allocator.allocate(5, range(2)) is None
    assert np.array_equal(allocator.references, before)


@pytest.mark.parametrize("method", ["release", "retain"])
def test_free_pages_can_be_neither_released_nor_retained(method: str) -> None:
    allocator = PageAllocator(2, 4, page_size=1)
    kept, gone = claim(allocator, 2, range(2)), claim(allocator, 2, range(2))
    allocator.release(gone)
    mixed = PageRange(range(2), np.concatenate([kept.pages, gone.pages]), 1, 4)
    before = allocator.references.copy()
    for extent in (gone, mixed):
        with pytest.raises(IntegrityError, match="pages that are free"):
            getattr(allocator, method)(extent)
        assert np.array_equal(allocator.references, before)


class Pages(RuleBasedStateMachine):
    """The allocator against a dict of reference counts."""

    extents = Bundle("extents")

    @initialize(layers=st.integers(1, 3), pages=st.integers(1, 9), page_size=st.integers(1, 4))
    def start(self, layers: int, pages: int, page_size: int) -> None:
        self.allocator = PageAllocator(layers, pages, page_size)
        self.counts = {(layer, page): 0 for layer in range(layers) for page in range(pages)}
        self.layers, self.pages, self.page_size = layers, pages, page_size

    def cells(self, extent: PageRange) -> list[tuple[int, int]]:
        return [(layer, int(page)) for layer in extent.layers for page in extent.pages]

    @rule(target=extents, tokens=st.integers(1, 12), data=st.data())
    def allocate(self, tokens: int, data: st.DataObject) -> Any:
        start = data.draw(st.integers(0, self.layers - 1))
        layers = range(start, data.draw(st.integers(start + 1, self.layers)))
        need = -(-tokens // self.page_size)
        free = [p for p in range(self.pages) if all(self.counts[layer, p] == 0 for layer in layers)]
        runs = [p for p in free if all(p + i in free for i in range(need))]
        extent = self.allocator.allocate(tokens, layers)
        if len(free) < need:
            assert extent is None
            return multiple()
        assert extent is not None
        assert extent.pages.tolist() == (list(range(runs[0], runs[0] + need)) if runs else free[:need])
        assert len(set(extent.slots().tolist())) == tokens
        for cell in self.cells(extent):
            self.counts[cell] += 1
        return extent

    @rule(target=extents, extent=extents)
    def retain(self, extent: PageRange) -> PageRange:
        self.allocator.retain(extent)
        for cell in self.cells(extent):
            self.counts[cell] += 1
        return extent

    @rule(target=extents, extent=consumes(extents), data=st.data())
    def retain_a_part(self, extent: PageRange, data: st.DataObject) -> Any:
        part = extent.below(data.draw(st.integers(extent.layers.start, extent.layers.stop)))
        self.allocator.retain(part)
        for cell in self.cells(part):
            self.counts[cell] += 1
        return multiple(extent, part)

    @rule(extent=consumes(extents))
    def release(self, extent: PageRange) -> None:
        self.allocator.release(extent)
        for cell in self.cells(extent):
            self.counts[cell] -= 1

    @rule(data=st.data())
    def release_what_is_free(self, data: st.DataObject) -> None:
        free = [cell for cell, count in self.counts.items() if count == 0]
        if free:
            layer, page = data.draw(st.sampled_from(free))
            used = [p for p in range(self.pages) if self.counts[layer, p]]
            with pytest.raises(IntegrityError):
                self.allocator.release(PageRange(range(layer, layer + 1), np.array([*used, page]), self.page_size, 1))

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "allocator"):
            expected = np.array(list(self.counts.values())).reshape(self.layers, self.pages)
            assert np.array_equal(self.allocator.references, expected)
            assert self.allocator.used == int((expected > 0).sum())


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=40)
