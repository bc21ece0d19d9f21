"""Who holds which K/V pages, and how many of their slots are of use."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from remask.engine.memory import Memory
from remask.engine.running import RunningRequest
from remask.store.pages import PageRange


@dataclass(frozen=True, slots=True)
class Holder:
    """A running request, or a part of the store. Pages are counted once a layer.

    Attributes:
        name: the request's id; "prefixes" or "pages" for the store's entries and exact pages.
        tokens: positions whose K/V it can read, a layer's worth.
        pages: page-layers that it references.
        shared: those of `pages` that another holder references too.
        found: tokens that it took from the store instead of computing them.
    """

    name: str
    tokens: int
    pages: int
    shared: int
    found: int = 0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The pages of an engine at one moment. A page-layer is one page in one layer; it costs its bytes once.

    Attributes:
        page_size: token slots a page.
        total, used, shared: page-layers that exist, that anybody references, and that more than one does.
        references: page-layers as they would be if nothing were shared.
        slots, wasted: token slots of the used ones, and those among them that hold no token (internal fragmentation).
        bytes: of the used page-layers and of boundary states.
        asked_tokens, hit_tokens: tokens that exact pages were looked up for so far, and found.
        holders: who references pages, running requests first.
    """

    page_size: int
    total: int
    used: int
    shared: int
    references: int
    slots: int
    wasted: int
    bytes: int
    asked_tokens: int
    hit_tokens: int
    holders: tuple[Holder, ...]

    @property
    def utilisation(self) -> float:
        """Share of the used slots that hold a token; 1 where none is used."""
        return 1 - self.wasted / self.slots if self.slots else 1.0


def report(memory: Memory, requests: Iterable[RunningRequest]) -> MemoryReport:
    """The pages of `memory` as they are, with `requests` running. Changes nothing."""
    counts, size = memory.allocator.references, memory.allocator.page_size
    filled = np.zeros_like(counts)
    holders = []
    for running in requests:
        extents = list(running.owned) if running.lease is None else [*running.owned, running.lease.extent]
        tokens = sum(len(branch.canvas) for branch in running.branches)
        holders.append(_holder(running.request.id, tokens, extents, counts, filled, size, running.usage.cached_tokens))
    stored = [entry.extent for entry in memory.store.entries]
    pages = [page.extent for page in memory.chain.pages]
    if stored:
        holders.append(_holder("prefixes", memory.store.tokens, stored, counts, filled, size))
    if pages:
        holders.append(_holder("pages", memory.chain.tokens, pages, counts, filled, size))
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
    )


def _holder(
    name: str,
    tokens: int,
    extents: list[PageRange],
    counts: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    filled: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    size: int,
    found: int = 0,
) -> Holder:
    """Count the pages of a holder, and note in `filled` how many slots of each page hold a token."""
    pages = shared = 0
    for extent in extents:
        layers = slice(extent.layers.start, extent.layers.stop)
        pages += len(extent.pages) * len(extent.layers)
        shared += int((counts[layers, extent.pages] > 1).sum())
        held = np.minimum(extent.tokens - np.arange(len(extent.pages)) * size, size)
        filled[layers, extent.pages] = np.maximum(filled[layers, extent.pages], held)
    return Holder(name, tokens, pages, shared, found)
