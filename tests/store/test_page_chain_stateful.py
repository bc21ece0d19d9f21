"""The chain of exact pages against a model in plain Python, as requests come, wait, publish, end and are cancelled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from remask.store.chain import Page, PageChain
from remask.store.entries import prefix_hash
from remask.store.pages import Extent, PageAllocator

LAYERS = 2
Path = tuple[int, ...]  # all tokens from the first to a page's last


@dataclass(eq=False)
class Reader:
    """A request: its tokens, the pages that it reads, those that it writes, and what it has yet to publish."""

    tokens: list[int]
    found: list[Page]
    own: list[Extent]
    expected: list[int]
    key: int | None
    last: Page | None
    done: int = 0  # pages published or passed over
    stored: bool = True


class Chain(RuleBasedStateMachine):
    readers = Bundle("readers")

    @initialize(
        budget=st.integers(0, 24), pages=st.integers(2, 14), size=st.integers(1, 3), colliding=st.integers(0, 2)
    )
    def start(self, budget: int, pages: int, size: int, colliding: int) -> None:
        self.size, self.budget, self.colliding = size, budget, colliding
        self.allocator = PageAllocator(LAYERS, pages, size)
        self.chain = PageChain(self.allocator, budget, b"m", hash=self.hash)
        self.running: list[Reader] = []
        self.written: dict[int, Path] = {}  # what stands in a page of the pool, by its number
        self.line: list[Path] = []  # stored pages, the longest unused first; exact where no hash collides
        self.pending: list[int] = []

    def hash(self, tokens: Sequence[int], root: bytes) -> int:
        if not self.colliding:
            return prefix_hash(tokens, root)
        return (sum(tokens) + 3 * sum(root)) % (5 if self.colliding == 1 else 2)

    def path(self, page: Page) -> Path:
        return self.written[int(page.extent.pages[0])]

    def leaf_to_go(self, keep: Path | None = None) -> Path | None:
        """The longest unused page that nothing follows and nobody else owns."""
        owners = {self.path(page): int(self.allocator.references[0, page.extent.pages[0]]) for page in self.chain.pages}
        parents = {path[: -self.size] for path in self.line}
        idle = (path for path in self.line if path not in parents and owners[path] == 1 and path != keep)
        return next(idle, None)

    def give_way(self, keep: Page | None = None) -> bool:
        """One eviction, by the store and by the model."""
        goes = self.leaf_to_go(None if keep is None else self.path(keep))
        went = self.chain.evict_one(() if keep is None else (keep.key,))
        if not self.colliding:
            assert went == (goes is not None)
            if goes is not None:
                self.line.remove(goes)
        return went

    @rule(
        target=readers,
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        grown=st.integers(0, 4),
        base=st.none() | readers,
    )
    def begin(self, tokens: list[int], grown: int, base: Reader | None) -> Any:
        """What the engine does with a request; `grown` tokens are its answer, and `base` an earlier turn."""
        prompt = (tokens if base is None else [*base.tokens, *tokens])[:12]
        keys = self.chain.identities(prompt)
        missing = next((key for key in keys if all(page.key != key for page in self.chain.pages)), None)
        assert self.chain.is_next_pending(keys) == (missing in self.pending)
        if missing in self.pending:
            return multiple()
        found = self.chain.match(prompt, keys)
        for number, page in enumerate(found):
            assert self.path(page) == tuple(prompt[: (number + 1) * self.size]), "K/V of other tokens"
        if not self.colliding:
            leads = [tuple(prompt[: (number + 1) * self.size]) for number in range(len(keys))]
            run = next((i for i, lead in enumerate(leads) if lead not in self.line), len(leads))
            assert len(found) == run
        whole = prompt + [0] * grown
        rest = len(whole) - len(found) * self.size
        reader = Reader(whole, found, [], list(keys[len(found) :]), None, None)
        self.running.append(reader)
        while (own := self.allocator.allocate(rest, range(LAYERS)) if rest else None) is None and rest:
            if not self.give_way():
                self.running.remove(reader)
                for page in found:
                    self.allocator.release(page.extent)
                return multiple()
        reader.own = own.split() if own is not None else []
        for extent in reader.own:
            self.written[int(extent.pages[0])] = ()  # nothing of worth yet
        reader.done = len(found)
        reader.last = found[-1] if found else None
        reader.key = reader.last.key if reader.last is not None else None
        self.chain.record_lookup(found, len(keys))
        if not self.colliding:
            for page in reversed(found):
                self.line.remove(self.path(page))
                self.line.append(self.path(page))
        self.chain.announce(reader.expected)
        self.pending += reader.expected
        return reader

    @rule(reader=readers, count=st.integers(1, 4))
    def publish(self, reader: Reader, count: int) -> None:
        """Its next pages are complete."""
        for _ in range(count):
            end = (reader.done + 1) * self.size
            if reader not in self.running or end > len(reader.tokens):
                return
            tokens, extent = reader.tokens[end - self.size : end], reader.own[reader.done - len(reader.found)]
            self.written[int(extent.pages[0])] = tuple(reader.tokens[:end])
            key = self.chain.identity(tokens, reader.key)
            if reader.stored:
                reader.last = self.offer(reader, tuple(reader.tokens[:end]), key, extent)
                reader.stored = reader.last is not None
            reader.key, reader.done = key, reader.done + 1
            if key in reader.expected:
                reader.expected.remove(key)
                self.chain.withdraw([key])
                self.pending.remove(key)

    def offer(self, reader: Reader, path: Path, key: int, extent: Extent) -> Page | None:
        parent = None if reader.last is None else self.path(reader.last)
        stale = reader.last is not None and reader.last not in self.chain.pages
        exact = not self.colliding
        if exact and not stale and path not in self.line:
            while (len(self.line) + 1) * self.size > self.budget:
                goes = self.leaf_to_go(parent)
                if goes is None:
                    break
                self.line.remove(goes)
        page = self.chain.publish(path[-self.size :], key, reader.last, extent)
        if page is not None:
            assert self.path(page) == path, "the page of other tokens"
        if exact and not stale:
            room = path in self.line or (len(self.line) + 1) * self.size <= self.budget
            assert (page is not None) == room
            if page is not None and path not in self.line:
                self.line.append(path)
        return page

    @rule(reader=consumes(readers))
    def end(self, reader: Reader) -> None:
        """Done or cancelled: what was expected is given up, and every reference dropped."""
        if reader not in self.running:
            return
        self.running.remove(reader)
        for extent in [*(page.extent for page in reader.found), *reader.own]:
            self.allocator.release(extent)
        self.chain.withdraw(reader.expected)
        for key in reader.expected:
            self.pending.remove(key)

    @rule()
    def evict(self) -> None:
        self.give_way()

    @invariant()
    def every_page_has_its_owners_and_no_other(self) -> None:
        if not hasattr(self, "chain"):
            return
        expected = np.zeros_like(self.allocator.references)
        extents = [page.extent for page in self.chain.pages]
        for reader in self.running:
            extents += [*(page.extent for page in reader.found), *reader.own]
        for extent in extents:
            expected[:, extent.pages] += 1
        assert np.array_equal(self.allocator.references, expected)

    @invariant()
    def chains_are_whole_and_hold_what_was_written(self) -> None:
        if not hasattr(self, "chain"):
            return
        pages = {page.key: page for page in self.chain.pages}
        assert self.chain.token_count == len(pages) * self.size <= self.budget
        for page in pages.values():
            assert self.path(page)[-self.size :] == page.tokens
            if page.parent is not None:
                assert self.path(pages[page.parent]) == self.path(page)[: -self.size]
            assert page.children == sum(other.parent == page.key for other in pages.values())
        if not self.colliding:
            assert [self.path(page) for page in self.chain.pages] == self.line


TestChain = Chain.TestCase
TestChain.settings = settings(max_examples=100, stateful_step_count=40)
