"""Pages beside a dict of their counts, and the identity of prefixes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from remask.errors import IntegrityError
from remask.store.entries import add_tenant, prefix_hash, prefix_hashes
from remask.store.pages import Extent, PageAllocator
from tests.goldens import cache_policy


def test_slots_follow_the_pages() -> None:
    extent = Extent(range(2), np.array([3, 0, 7]), page_size=4, length=10)
    assert extent.slots().tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 28, 29]
    below = extent.below(1)
    assert below.layers == range(1)
    assert below.slots().tolist() == extent.slots().tolist()


def test_a_run_that_just_fits_is_taken_before_scattered_pages() -> None:
    allocator = PageAllocator(1, 4, page_size=1)
    allocator.claim(Extent(range(1), np.array([1]), 1, 1))
    extent = allocator.allocate(2, range(1))
    assert extent is not None
    assert extent.pages.tolist() == [2, 3]


class Pages(RuleBasedStateMachine):
    """The allocator against a dict of reference counts."""

    extents = Bundle("extents")

    @initialize(layers=st.integers(1, 3), pages=st.integers(1, 9), page_size=st.integers(1, 4))
    def start(self, layers: int, pages: int, page_size: int) -> None:
        self.allocator = PageAllocator(layers, pages, page_size)
        self.counts = {(layer, page): 0 for layer in range(layers) for page in range(pages)}
        self.layers, self.pages, self.page_size = layers, pages, page_size

    def cells(self, extent: Extent) -> list[tuple[int, int]]:
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
    def retain(self, extent: Extent) -> Extent:
        self.allocator.retain(extent)
        for cell in self.cells(extent):
            self.counts[cell] += 1
        return extent

    @rule(target=extents, extent=consumes(extents), data=st.data())
    def retain_a_part(self, extent: Extent, data: st.DataObject) -> Any:
        part = extent.below(data.draw(st.integers(extent.layers.start, extent.layers.stop)))
        self.allocator.retain(part)
        for cell in self.cells(part):
            self.counts[cell] += 1
        return multiple(extent, part)

    @rule(extent=consumes(extents))
    def release(self, extent: Extent) -> None:
        self.allocator.release(extent)
        for cell in self.cells(extent):
            self.counts[cell] -= 1

    @rule(data=st.data())
    def release_or_retain_what_is_free(self, data: st.DataObject) -> None:
        free = [cell for cell, count in self.counts.items() if count == 0]
        if free:
            layer, page = data.draw(st.sampled_from(free))
            used = [p for p in range(self.pages) if self.counts[layer, p]]
            mixed = Extent(range(layer, layer + 1), np.array([*used, page]), self.page_size, 1)
            for act in (self.allocator.release, self.allocator.retain):
                with pytest.raises(IntegrityError, match="pages that are free"):
                    act(mixed)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "allocator"):
            expected = np.array(list(self.counts.values())).reshape(self.layers, self.pages)
            assert np.array_equal(self.allocator.references, expected)
            assert self.allocator.used == int((expected > 0).sum())


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=40)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=8)


@pytest.mark.parametrize("name", sorted(cache_policy()["prefixes"]))
def test_without_salt_it_is_the_authors_key(name: str) -> None:
    golden = cache_policy()
    assert prefix_hash(golden["prefixes"][name]) == int(golden["xxh64_of_uint32_le_ids"][name])


@given(TOKENS, TOKENS)
def test_order_and_length_count(a: list[int], b: list[int]) -> None:
    assert (prefix_hash(a) == prefix_hash(b)) == (a == b)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_beyond_32_bits_are_refused_not_wrapped(token: int) -> None:
    with pytest.raises(OverflowError):
        prefix_hash([token])


@given(st.text(), st.text(), TOKENS)
def test_tenants_salts_tell_them_apart(one: str, other: str, tokens: list[int]) -> None:
    assert (add_tenant(b"model", one) == add_tenant(b"model", other)) == (one == other)
    hashes = [prefix_hash(tokens, add_tenant(b"m", salt)) for salt in (one, other)]
    assert (hashes[0] == hashes[1]) == (one == other)


def test_no_salt_of_a_tenant_changes_nothing() -> None:
    assert add_tenant(b"model", "") == b"model"


@given(TOKENS, st.data())
def test_hashes_of_many_lengths_are_those_of_each(tokens: list[int], data: st.DataObject) -> None:
    lengths = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    assert prefix_hashes(tokens, lengths, b"s") == [prefix_hash(tokens[:length], b"s") for length in lengths]
