"""Exact pages: what is found, who goes first, and what happens when hashes collide."""

from collections.abc import Sequence

import pytest

from remask.errors import IntegrityError
from remask.store.chain import Page, PageChain
from remask.store.pages import PageAllocator, PageRange

SIZE = 2


class Shelf:
    """A chain store, and a writer whose own pages are freed at once, so that the store alone keeps them."""

    def __init__(self, budget: int = 100, pages: int = 50) -> None:
        self.allocator = PageAllocator(2, pages, SIZE)
        self.chain = PageChain(self.allocator, budget, b"model")

    def write(self, tokens: Sequence[int], salt: str = "") -> list[Page | None]:
        """Publish all whole pages of `tokens`."""
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

    def claim(self) -> PageRange:
        extent = self.allocator.allocate(SIZE, range(2))
        assert extent is not None
        return extent

    def read(self, tokens: Sequence[int], salt: str = "") -> list[Page]:
        """Match, and count as used."""
        keys = self.chain.identities(tokens, salt)
        found = self.chain.match(tokens, keys, salt)
        self.chain.found(found, len(keys))
        return found

    def close(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self.allocator.release(page.extent)

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
    assert shelf.chain.tokens == 6


def test_the_same_page_after_another_is_another_page() -> None:
    shelf = Shelf()
    shelf.write([1, 1, 5, 5])
    shelf.write([2, 2, 5, 5])
    assert len(shelf.chain.pages) == 4
    assert len({page.key for page in shelf.chain.pages}) == 4


def test_tenants_and_models_have_chains_of_their_own() -> None:
    shelf = Shelf()
    shelf.write([1, 2, 3, 4], salt="a")
    assert shelf.read([1, 2, 3, 4], salt="b") == shelf.read([1, 2, 3, 4]) == []
    assert len(shelf.read([1, 2, 3, 4], salt="a")) == 2
    other = PageChain(shelf.allocator, 10, b"another model")
    assert set(other.identities([1, 2, 3, 4], "a")).isdisjoint(shelf.chain.identities([1, 2, 3, 4], "a"))


def test_the_first_writer_wins_and_the_second_goes_on_from_there() -> None:
    shelf = Shelf()
    first = shelf.write([1, 2, 3, 4])
    used = shelf.allocator.used
    assert shelf.write([1, 2, 3, 4, 5, 6])[:2] == first
    assert shelf.allocator.used == used + 2
    assert shelf.chain.stats.published == 3


def test_the_longest_unused_leaf_goes_first_and_a_parent_after_its_children() -> None:
    shelf = Shelf()
    shelf.write([1, 1, 2, 2, 3, 3])
    shelf.write([1, 1, 4, 4])
    shelf.write([5, 5])
    shelf.close(shelf.read([1, 1, 2, 2, 3, 3]))
    gone = []
    while shelf.chain.pages:
        before = shelf.tokens
        assert shelf.chain.give_way()
        gone += [tokens for tokens in before if tokens not in shelf.tokens]
    assert gone == [(4, 4), (5, 5), (3, 3), (2, 2), (1, 1)]
    assert not shelf.chain.give_way()
    assert (shelf.chain.stats.evictions, shelf.allocator.used) == (5, 0)


def test_what_is_read_stays() -> None:
    shelf = Shelf()
    shelf.write([1, 1, 2, 2])
    shelf.write([3, 3])
    reading = shelf.read([1, 1, 2, 2])
    assert shelf.chain.drop() == 1
    assert shelf.tokens == [(2, 2), (1, 1)]
    shelf.close(reading)
    assert shelf.chain.drop() == 2


def test_a_full_budget_makes_room_but_not_from_the_pages_own_chain() -> None:
    shelf = Shelf(budget=4)
    shelf.write([1, 1])
    shelf.write([2, 2, 3, 3])
    assert shelf.tokens == [(2, 2), (3, 3)]
    assert shelf.write([2, 2, 3, 3, 4, 4])[2] is None
    assert shelf.chain.stats.refused == 1
    assert Shelf(budget=1).write([1, 1]) == [None]


def test_a_page_whose_parent_has_gone_is_not_stored() -> None:
    shelf = Shelf()
    (parent,) = shelf.write([1, 1])
    assert parent is not None
    shelf.chain.drop()
    shelf.write([1, 1])  # the same tokens, but not the page that the writer followed
    extent = shelf.claim()
    assert shelf.chain.publish([2, 2], shelf.chain.identities([1, 1, 2, 2])[1], parent, extent) is None
    assert shelf.allocator.references[0, extent.pages[0]] == 1


def test_a_collision_is_a_miss_and_nothing_is_hung_on_the_wrong_chain() -> None:
    shelf = Shelf()
    shelf.chain.hash = lambda tokens, root: sum(tokens) + 100 * len(root)
    (page,) = shelf.write([1, 3])
    keys = shelf.chain.identities([3, 1, 5, 5])
    assert page is not None
    assert keys[0] == page.key
    assert shelf.read([3, 1, 5, 5]) == []
    assert shelf.write([3, 1, 5, 5]) == [None]
    assert shelf.tokens == [(1, 3)]
    assert [page.tokens for page in shelf.read([1, 3, 5, 5])] == [(1, 3)]


def test_a_child_of_one_page_is_not_found_after_another_with_the_same_tokens() -> None:
    shelf = Shelf()
    shelf.chain.hash = lambda tokens, _: sum(tokens)
    shelf.write([1, 1, 2, 3])
    shelf.write([4, 4])
    assert shelf.chain.identities([4, 4, 2, 3])[1] == shelf.chain.pages[1].key
    assert [page.tokens for page in shelf.read([4, 4, 2, 3])] == [(4, 4)]


def test_pages_that_somebody_computes_are_awaited_until_they_are_given_up() -> None:
    shelf = Shelf()
    keys = shelf.chain.identities([1, 1, 2, 2, 3, 3])
    assert not shelf.chain.awaited(keys)
    shelf.chain.expect(keys)
    shelf.chain.expect(keys[:1])
    assert shelf.chain.awaited(keys)
    assert not shelf.chain.awaited([])
    shelf.chain.give_up(keys)
    assert shelf.chain.awaited(keys), "another one computes the first page, too"
    shelf.chain.give_up(keys[:1])
    assert not shelf.chain.awaited(keys)
    with pytest.raises(IntegrityError, match="nobody computes"):
        shelf.chain.give_up(keys[:1])


def test_only_the_first_missing_page_is_awaited() -> None:
    shelf = Shelf()
    shelf.write([1, 1])
    keys = shelf.chain.identities([1, 1, 2, 2, 3, 3])
    shelf.chain.expect(keys[2:])
    assert not shelf.chain.awaited(keys)
    shelf.chain.expect(keys[1:2])
    assert shelf.chain.awaited(keys)


def test_tenants_whose_hashes_collide_do_not_meet() -> None:
    shelf = Shelf()
    shelf.chain.hash = lambda *_: 7
    assert shelf.write([1, 2], "a") != [None]
    assert shelf.read([1, 2], "b") == []
    assert shelf.write([1, 2], "b") == [None]
    assert len(shelf.read([1, 2], "a")) == 1
