"""The prefix store against a model in plain Python: lists, dicts, and the admission rule as written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from remask.errors import IntegrityError
from remask.store.entries import PrefixEntry, add_tenant
from remask.store.pages import Extent, PageAllocator
from remask.store.prefix import Lease, PrefixStore
from tests.store.test_prefix_store import match

LAYERS = 2
SALTS = {add_tenant(b"", salt): salt for salt in ("", "tenant")}


@dataclass
class Kept:
    tokens: tuple[int, ...]
    salt: str
    ready: bool = False
    leases: int = 0


@dataclass
class Model:
    """What the store should hold; `line` is in the order of eviction."""

    budget: int
    pages: int
    page_size: int
    lru: bool
    colliding: bool
    longest: bool
    line: list[Kept] = field(default_factory=list)
    elsewhere: int = 0  # pages of running canvases
    asked: set[int] = field(default_factory=set)

    def hash(self, tokens: Sequence[int], salt: str) -> int:
        return sum(tokens) % 3 if self.colliding else hash((salt, tuple(tokens)))

    def need(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def exact(self, tokens: tuple[int, ...], salt: str) -> Kept | None:
        return next((kept for kept in self.line if (kept.tokens, kept.salt) == (tokens, salt)), None)

    def find(self, tokens: tuple[int, ...], salt: str) -> Kept | None:
        """Every entry is looked at, as the index need not."""
        levels = [kept for kept in self.line if kept.salt == salt and kept.tokens == tokens[: len(kept.tokens)]]
        best = max(levels, key=lambda kept: len(kept.tokens), default=None)
        if best is None or best.tokens == tokens:
            return best
        if not self.longest:
            return None
        if not self.admits(tokens):
            return best
        once = self.hash(tokens, salt) not in self.asked
        return best if once and 2 * len(best.tokens) >= len(tokens) else None

    def admits(self, tokens: tuple[int, ...]) -> bool:
        return len(tokens) < self.budget and self.need(len(tokens)) <= self.pages

    def fits(self, line: list[Kept], tokens: tuple[int, ...]) -> bool:
        room = self.budget - sum(len(kept.tokens) for kept in line)
        free = self.pages - self.elsewhere - sum(self.need(len(kept.tokens)) for kept in line)
        return len(tokens) < room and self.need(len(tokens)) <= free

    def after(self, tokens: tuple[int, ...], salt: str) -> list[Kept] | None:
        """What is left once room is made for `tokens`, or None where it cannot be made."""
        line = list(self.line)
        twin = next((kept for kept in line if self.hash(kept.tokens, kept.salt) == self.hash(tokens, salt)), None)
        if twin is not None:
            if twin.leases or not twin.ready:
                return None
            line.remove(twin)
        for kept in list(line):
            if self.fits(line, tokens):
                break
            if not kept.leases and kept.ready:
                line.remove(kept)
        return line if self.fits(line, tokens) else None


class Store(RuleBasedStateMachine):
    """Requests come, wait, lease, are cancelled and end, in any order; canvases take and free pages beside them."""

    leases = Bundle("leases")
    canvases = Bundle("canvases")
    entries = Bundle("entries")

    @initialize(
        budget=st.integers(1, 20),
        pages=st.integers(1, 12),
        page_size=st.integers(1, 4),
        lru=st.booleans(),
        colliding=st.booleans(),
        longest=st.booleans(),
    )
    def start(self, budget: int, pages: int, page_size: int, lru: bool, colliding: bool, longest: bool) -> None:
        self.model = Model(budget, pages, page_size, lru, colliding, longest)
        self.allocator = PageAllocator(LAYERS, pages, page_size)
        self.store = PrefixStore(
            self.allocator,
            budget,
            "lru" if lru else "fifo",
            b"",
            lambda tokens: torch.empty(LAYERS - 1, tokens, 1),
            1,
            "longest" if longest else "exact",
            hashes=lambda tokens, lengths, salt: [self.model.hash(tokens[:n], SALTS[salt]) for n in lengths],
        )
        self.partial = 0
        self.out: list[tuple[Lease, Kept]] = []
        self.claimed: list[Extent] = []
        self.evictions = 0

    def lend(self, lease: Lease | None, kept: Kept) -> Lease:
        assert lease is not None
        assert lease.entry.tokens == kept.tokens
        kept.leases += 1
        self.out.append((lease, kept))
        return lease

    @rule(
        target=leases,
        tokens=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        boundary=st.integers(1, LAYERS),
        salt=st.sampled_from(list(SALTS.values())),
    )
    def ask(self, tokens: list[int], boundary: int, salt: str) -> Any:
        """What the engine does with a request: match, else reserve where that can ever succeed."""
        return self.asked_for(tokens, boundary, salt)

    @rule(target=leases, data=st.data(), boundary=st.integers(1, LAYERS))
    def ask_for_more(self, data: st.DataObject, boundary: int) -> Any:
        """The next turn of a conversation: what is stored, and some more."""
        if not self.model.line:
            return multiple()
        kept = data.draw(st.sampled_from(self.model.line))
        more = data.draw(st.lists(st.integers(0, 3), max_size=4))
        return self.asked_for([*kept.tokens, *more], boundary, kept.salt)

    def asked_for(self, tokens: list[int], boundary: int, salt: str) -> Any:
        key = tuple(tokens)
        kept = self.model.find(key, salt)
        found = self.store.find(tokens, salt)
        lease = match(self.store, tokens, boundary, salt)
        assert (lease is None) == (kept is None)
        assert (None if lease is None else lease.entry) is found
        if kept is not None:
            if kept.tokens != key:
                self.model.asked.add(self.model.hash(key, salt))
                self.partial += 1
            if self.model.lru:
                self.model.line.remove(kept)
                self.model.line.append(kept)
            assert lease is not None
            assert lease.hit
            return self.lend(lease, kept)
        assert self.store.fits(len(key)) == self.model.admits(key)
        left = self.model.after(key, salt)
        before = [id(entry) for entry in self.store.entries]
        lease = self.store.reserve(tokens, boundary, salt)
        if left is None:
            assert lease is None
            assert [id(entry) for entry in self.store.entries] == before
            return multiple()
        self.evictions += len(self.model.line) - len(left)
        kept = Kept(key, salt)
        self.model.line = [*left, kept]
        self.model.asked.discard(self.model.hash(key, salt))
        assert lease is not None
        assert not lease.hit
        return self.lend(lease, kept)

    @rule(lease=leases)
    def publish(self, lease: Lease) -> None:
        if lease.entry in self.store.entries:
            self.store.publish(lease.entry)
            kept = self.model.exact(lease.entry.tokens, lease.entry.cache_salt)
            assert kept is not None
            kept.ready = True

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        kept = next(kept for held, kept in self.out if held is lease)
        self.store.release(lease)
        kept.leases -= 1
        self.out = [(held, other) for held, other in self.out if held is not lease]
        with pytest.raises(IntegrityError):
            self.store.release(lease)

    @rule()
    def publish_all(self) -> None:
        """Passes of cancelled requests run too."""
        for entry in self.store.entries:
            self.store.publish(entry)
        for kept in self.model.line:
            kept.ready = True

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        keys: list[int | None] = [None, *(entry.key for entry in self.store.entries)]
        key = data.draw(st.sampled_from(keys))
        gone = [
            kept
            for kept in self.model.line
            if kept.ready and not kept.leases and key in (None, self.model.hash(kept.tokens, kept.salt))
        ]
        assert self.store.drop(key) == len(gone)
        self.evictions += len(gone)
        self.model.line = [kept for kept in self.model.line if kept not in gone]

    @rule(data=st.data())
    def give_way(self, data: st.DataObject) -> None:
        spare = data.draw(st.sampled_from([None, *self.model.line]))
        idle = [kept for kept in self.model.line if kept.ready and not kept.leases and kept is not spare]
        entry = None if spare is None else self.store.find(spare.tokens, spare.salt)
        assert self.store.evict_one(entry) == bool(idle)
        self.evictions += bool(idle)
        self.model.line = [kept for kept in self.model.line if not idle or kept is not idle[0]]

    @rule(target=canvases, tokens=st.integers(1, 8))
    def claim(self, tokens: int) -> Any:
        extent = self.allocator.allocate(tokens, range(LAYERS))
        free = self.model.pages - self.model.elsewhere - sum(self.model.need(len(k.tokens)) for k in self.model.line)
        assert (extent is not None) == (self.model.need(tokens) <= free)
        if extent is None:
            return multiple()
        self.model.elsewhere += len(extent.pages)
        self.claimed.append(extent)
        return extent

    @rule(extent=consumes(canvases))
    def free(self, extent: Extent) -> None:
        self.allocator.release(extent)
        self.model.elsewhere -= len(extent.pages)
        self.claimed = [other for other in self.claimed if other is not extent]

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        seen = [(entry.tokens, entry.cache_salt, entry.ready, entry.leases) for entry in self.store.entries]
        assert seen == [(kept.tokens, kept.salt, kept.ready, kept.leases) for kept in self.model.line]
        assert self.store.stats.partial_hits == self.partial
        told = [(info.tokens, info.ready, info.leases) for info in self.store.describe()]
        assert told == [(len(kept.tokens), kept.ready, kept.leases) for kept in self.model.line]
        assert self.store.token_count == sum(len(kept.tokens) for kept in self.model.line)
        assert self.store.token_count < self.model.budget or not self.model.line
        assert self.store.stats.evictions == self.evictions

    @invariant()
    def every_page_has_its_owners_and_no_other(self) -> None:
        if not hasattr(self, "store"):
            return
        expected = np.zeros_like(self.allocator.references)
        owner: dict[int, int] = {}
        owners: list[PrefixEntry | Extent] = [*self.store.entries, *self.claimed]
        for number, item in enumerate(owners):
            extent = item.extent if isinstance(item, PrefixEntry) else item
            expected[:, extent.pages] += 1
            for page in extent.pages.tolist():
                assert owner.setdefault(page, number) == number
        for lease, _ in self.out:
            assert any(lease.entry is entry for entry in self.store.entries)
            assert lease.extent.slots().tolist() == lease.entry.extent.slots().tolist()
            expected[: lease.layers, lease.extent.pages] += 1
        assert np.array_equal(self.allocator.references, expected)


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=80, stateful_step_count=50)
