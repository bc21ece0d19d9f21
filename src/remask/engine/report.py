"""Reports of K/V pages: which requests and store entries hold them, and how full they are."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from remask.engine.memory import Memory
from remask.engine.running import RunningRequest
from remask.store.chain import Page
from remask.store.entries import PrefixEntry
from remask.store.pages import Extent

Counts: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]
PageSet: TypeAlias = set[tuple[int, int]]  # (layer, page)


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of consecutive positions, which have the same numbers in all of these layers."""

    layers: tuple[int, int]  # the first layer, and the one after the last
    pages: tuple[int, ...]  # page numbers, in the order of the positions
    references: tuple[int, ...]  # number of holders of each page, in the layer where it is largest


@dataclass(frozen=True, slots=True)
class Holder:
    """A running request, or a part of the store. Pages are counted once a layer."""

    name: str  # the request's id; "prefixes" or "pages" for the store's entries and exact pages
    tokens: int  # positions whose K/V it can read, in one layer
    pages: int  # page-layers that it references
    shared: int  # those of `pages` that another holder references too
    found: int = 0  # tokens whose K/V it read from the store instead of computing them
    # Its page tables, including those of stored K/V that it reads; empty for the store itself
    tables: tuple[PageTable, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A shared prefix, or an exact page, in the store."""

    id: str  # its key, in hexadecimal
    # For a prefix, the longest other stored one that it begins with; for a page, the one before it; None without one
    parent: str | None
    tokens: int  # from the first of the canvas to its last, including those of its ancestors
    readers: tuple[str, ...]  # ids of the running requests that read it
    table: PageTable


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The pages of an engine at one moment. A page-layer is one page in one layer; it costs its bytes once."""

    page_size: int  # token slots a page
    total: int  # page-layers
    used: int  # those that have a holder
    shared: int  # those that have more than one
    references: int  # page-layers as they would be if nothing were shared
    slots: int  # token slots of the used page-layers
    wasted: int  # those of `slots` without a token (internal fragmentation)
    bytes: int  # of the used page-layers and of boundary states
    asked_tokens: int  # tokens of exact pages that were looked up so far
    hit_tokens: int  # those of them that were stored
    holders: tuple[Holder, ...]  # running requests first
    stored: tuple[StoredPart, ...]  # contents of the store, each part after its parent

    @property
    def utilisation(self) -> float:
        """Share of the used slots that hold a token; 1 if none is used."""
        return 1 - self.wasted / self.slots if self.slots else 1.0


def report_pages(memory: Memory, requests: Iterable[RunningRequest], *, detail: bool = False) -> MemoryReport:
    """Report who holds the pages of `memory`. `detail` adds page tables and `stored`, in O(pages) time."""
    store, chain = memory.store, memory.chain
    counts, size = memory.allocator.references, memory.allocator.page_size
    filled = np.zeros_like(counts)
    holders = []
    pages_of: dict[str, PageSet] = {}
    for running in requests:
        extents = list(running.claim.extents)
        if running.claim.lease is not None:
            extents.append(running.claim.lease.extent)
        tokens = sum(len(state.canvas) for state in running.canvases)
        tables = tuple(_table(extent, counts) for extent in extents) if detail else ()
        holder = _count_holder(running.id, tokens, extents, counts, filled)
        holders.append(replace(holder, found=running.record.usage.cached_tokens, tables=tables))
        if detail:
            pages_of[running.id] = set().union(*map(_page_set, extents))
    for name, tokens, parts in (
        ("prefixes", store.token_count, store.entries),
        ("pages", chain.token_count, chain.pages),
    ):
        if parts:
            holders.append(_count_holder(name, tokens, [part.extent for part in parts], counts, filled))
    stored: list[StoredPart] = []
    if detail:
        stored = [*_stored_prefixes(store.entries, counts, pages_of), *_stored_pages(chain.pages, counts, pages_of)]
    used = int((counts > 0).sum())
    return MemoryReport(
        page_size=size,
        total=counts.size,
        used=used,
        shared=int((counts > 1).sum()),
        references=int(counts.sum()),
        slots=used * size,
        wasted=used * size - int(filled.sum()),
        bytes=memory.bytes_used,
        asked_tokens=memory.chain.stats.queries,
        hit_tokens=memory.chain.stats.hits,
        holders=tuple(holders),
        stored=tuple(stored),
    )


def _stored_prefixes(
    entries: Iterable[PrefixEntry], counts: Counts, pages_of: Mapping[str, PageSet]
) -> list[StoredPart]:
    """The stored prefixes, each after the shorter ones that it begins with."""
    parts: list[StoredPart] = []
    shorter: list[PrefixEntry] = []
    for entry in sorted(entries, key=len):
        beginnings = [other for other in shorter if other.matches(entry.tokens[: len(other)], entry.cache_salt)]
        parent = f"{beginnings[-1].key:016x}" if beginnings else None
        parts.append(_stored_part(entry.key, parent, len(entry), entry.extent, counts, pages_of))
        shorter.append(entry)
    return parts


def _stored_pages(pages: Iterable[Page], counts: Counts, pages_of: Mapping[str, PageSet]) -> list[StoredPart]:
    """The exact pages, each after its parent."""
    children: dict[int | None, list[Page]] = {}
    for page in pages:
        children.setdefault(page.parent, []).append(page)
    line = deque((page, page.extent.length) for page in children.get(None, ()))  # with the tokens up to its end
    parts: list[StoredPart] = []
    while line:
        page, length = line.popleft()
        parent = None if page.parent is None else f"{page.parent:016x}"
        parts.append(_stored_part(page.key, parent, length, page.extent, counts, pages_of))
        line.extend((child, length + child.extent.length) for child in children.get(page.key, ()))
    return parts


def _stored_part(
    key: int, parent: str | None, tokens: int, extent: Extent, counts: Counts, pages_of: Mapping[str, PageSet]
) -> StoredPart:
    """The report of one stored prefix or page. `pages_of` are the pages that each running request can read."""
    pages = _page_set(extent)
    readers = tuple(request_id for request_id, others in pages_of.items() if not pages.isdisjoint(others))
    return StoredPart(f"{key:016x}", parent, tokens, readers, _table(extent, counts))


def _page_set(extent: Extent) -> PageSet:
    return {(layer, page) for layer in extent.layers for page in extent.pages.tolist()}


def _table(extent: Extent, counts: Counts) -> PageTable:
    layers = extent.layers
    references = counts[layers.start : layers.stop, extent.pages].max(axis=0, initial=0)
    return PageTable((layers.start, layers.stop), tuple(extent.pages.tolist()), tuple(references.tolist()))


def _count_holder(name: str, tokens: int, extents: Sequence[Extent], counts: Counts, filled: Counts) -> Holder:
    """Count the pages of a holder of `tokens`, whose K/V are in `extents`; `counts` are the references of all pages.

    Raises the entries of `filled`, the number of slots of each page that hold a token, to those of this holder.
    """
    pages = shared = 0
    for extent in extents:
        layers, size = slice(extent.layers.start, extent.layers.stop), extent.page_size
        pages += len(extent.pages) * len(extent.layers)
        shared += int((counts[layers, extent.pages] > 1).sum())
        page_tokens = np.minimum(extent.length - np.arange(len(extent.pages)) * size, size)
        filled[layers, extent.pages] = np.maximum(filled[layers, extent.pages], page_tokens)
    return Holder(name, tokens, pages, shared)
