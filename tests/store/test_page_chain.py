"""Exact pages: what is found, who goes first, and what happens when hashes collide."""

from collections.abc import Sequence

import pytest

from remask.errors import IntegrityError
from remask.store.chain import Page, PageChain
from remask.store.pages import Extent, PageAllocator

SIZE = 2


class Shelf:
    """A chain store, and a writer whose own pages are freed at once, so that the store alone keeps them."""

    def __init__(self, budget: int = 100, pages: int = 50) -> None:
        self.allocator = PageAllocator(2, pages, SIZE)
        self.chain = PageChain(self.allocator, budget, b"model")

    def write(self, tokens: Sequence[int], salt: str = "") -> list[Page | None]:
        stored: list[Page | None] = []
        for number, key in enumerate(self.chain.identities(tokens, salt)):
            extent = self.claim()
            parent = stored[-1] if stored else None
            page = self.chain.publish(tokens[number * SIZE :][:SIZE], key, parent, extent, salt)
            self.allocator.release(extent)
            stored.append(page)
            if page is None:
                break
        return stored

    def claim(self) -> Extent:
        extent = self.allocator.allocate(SIZE, range(2))
        assert extent is not None
        return extent

    def read(self, tokens: Sequence[int], salt: str = "") -> list[Page]:
        """Match, and count as used."""
        keys = self.chain.identities(tokens, salt)
        found = self.chain.match(tokens, keys, salt)
        self.chain.record_lookup(found, len(keys))
        return found

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [page.tokens for page in self.chain.pages]


def test_the_longest_run_of_leading_pages_is_found() -> None:
    shelf = Shelf()
    shelf.write([1, 2, 3, 4, 5, 6, 7])
    assert [page.tokens for page in shelf.read([1, 2, 3, 4, 5, 6, 7, 8])] == [(1, 2), (3, 4), (5, 6)]
    assert [page.tokens for page in shelf.read([1, 2, 3, 4, 0, 0])] == [(1, 2), (3, 4)]
    assert shelf.read([0, 0, 3, 4]) == []
    assert shelf.read([1]) == []
    stats = shelf.chain.stats
    assert (stats.queries, stats.hits, stats.published) == (8 + 6 + 4, 6 + 4, 3)
    assert [page.hits for page in shelf.chain.pages] == [1, 2, 2], "the longest unused first"
    assert shelf.chain.token_count == 6


def test_tenants_and_models_have_chains_of_their_own() -> None:
    shelf = Shelf()
    shelf.write([1, 2, 3, 4], salt="a")
    assert shelf.read([1, 2, 3, 4], salt="b") == shelf.read([1, 2, 3, 4]) == []
    assert len(shelf.read([1, 2, 3, 4], salt="a")) == 2
    other = PageChain(shelf.allocator, 10, b"another model")
    assert set(other.identities([1, 2, 3, 4], "a")).isdisjoint(shelf.chain.identities([1, 2, 3, 4], "a"))


def test_a_full_budget_makes_room_but_not_from_the_pages_own_chain() -> None:
    shelf = Shelf(budget=4)
    shelf.write([1, 1])
    shelf.write([2, 2, 3, 3])
    assert shelf.tokens == [(2, 2), (3, 3)]
    assert shelf.write([2, 2, 3, 3, 4, 4])[2] is None
    assert (shelf.chain.stats.rejections, shelf.chain.stats.evictions) == (1, 1)
    assert Shelf(budget=1).write([1, 1]) == [None]


def test_pages_that_somebody_computes_are_awaited_until_they_are_given_up() -> None:
    shelf = Shelf()
    keys = shelf.chain.identities([1, 1, 2, 2, 3, 3])
    assert not shelf.chain.is_next_pending(keys)
    shelf.chain.announce(keys)
    shelf.chain.announce(keys[:1])
    assert shelf.chain.is_next_pending(keys)
    assert not shelf.chain.is_next_pending([])
    shelf.chain.withdraw(keys)
    assert shelf.chain.is_next_pending(keys), "another one computes the first page, too"
    shelf.chain.withdraw(keys[:1])
    assert not shelf.chain.is_next_pending(keys)
    with pytest.raises(IntegrityError, match="nobody computes"):
        shelf.chain.withdraw(keys[:1])


def test_tenants_whose_hashes_collide_do_not_meet() -> None:
    shelf = Shelf()
    shelf.chain.hash = lambda *_: 7
    assert shelf.write([1, 2], "a") != [None]
    assert shelf.read([1, 2], "b") == []
    assert shelf.write([1, 2], "b") == [None]
    assert len(shelf.read([1, 2], "a")) == 1
