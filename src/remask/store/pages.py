"""Refcounted pages of K/V slots, counted per layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class PageRange:
    """Slots for `tokens` consecutive positions: the same page numbers in every layer of `layers`."""

    layers: range
    pages: NDArray[np.int64]
    page_size: int
    tokens: int

    def slots(self) -> NDArray[np.int64]:
        """Slot of each position, int64 [tokens]."""
        offsets = np.arange(self.tokens)
        slots: NDArray[np.int64] = self.pages[offsets // self.page_size] * self.page_size + offsets % self.page_size
        return slots

    def single(self) -> "list[PageRange]":
        """Each page of this extent as an extent of its own."""
        size = self.page_size
        return [
            PageRange(self.layers, self.pages[i : i + 1], size, min(size, self.tokens - i * size))
            for i in range(len(self.pages))
        ]

    def below(self, layer: int) -> "PageRange":
        """The part of this extent in layers under `layer`."""
        return PageRange(range(self.layers.start, layer), self.pages, self.page_size, self.tokens)


class PageAllocator:
    """Reference counts of all pages in all layers. It hands out page numbers and holds no tensor.

    Pages are counted per layer, because a request that reads a shared prefix in shallow layers needs its own pages for
    that prefix in deep layers only.
    """

    def __init__(self, layers: int, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.references = np.zeros((layers, pages), dtype=np.int32)
        self._used: int | None = 0  # counted anew when it is asked for after a change

    @property
    def used(self) -> int:
        """Pages in use, summed over layers."""
        if self._used is None:
            self._used = int(np.count_nonzero(self.references))
        return self._used

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` consecutive positions take in one layer."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int, layers: range) -> PageRange | None:
        """Claim pages for `tokens` positions in each of `layers`, each with one reference; None where too few are free.

        Attention reads consecutive pages in place, so the first run that is long enough is taken. Without such a run,
        scattered pages are taken.
        """
        extents = self.find([(tokens, layers)])
        if extents is None:
            return None
        self.claim(extents[0])
        return extents[0]

    def find(self, wanted: Sequence[tuple[int, range]]) -> tuple[PageRange, ...] | None:
        """Free pages for all of `wanted`, pairs of positions and layers; None where too few are. Claims nothing."""
        free = self.references == 0
        extents = []
        for tokens, layers in wanted:
            need = self.pages_for(tokens)
            rows = free[layers.start : layers.stop]
            usable = rows.all(axis=0)
            if usable.sum() < need:
                return None
            pages = _first_run(usable, need)
            rows[:, pages] = False
            extents.append(PageRange(layers, pages, self.page_size, tokens))
        return tuple(extents)

    def claim(self, extent: PageRange) -> None:
        """Take free pages, each with one reference. Raises `IntegrityError`, and changes nothing, on a page in use."""
        part = self.references[extent.layers.start : extent.layers.stop]
        if (part[:, extent.pages] > 0).any():
            raise IntegrityError(f"claimed pages that are in use: {extent.pages.tolist()} in layers {extent.layers}")
        part[:, extent.pages] = 1
        self._used = None

    def retain(self, extent: PageRange) -> None:
        """Add a reference to every page of `extent`. Raises `IntegrityError` where one is not in use."""
        self._part_in_use(extent, "retained")[:, extent.pages] += 1

    def release(self, extent: PageRange) -> None:
        """Drop a reference from every page of `extent`. Raises `IntegrityError` where one is free already."""
        self._part_in_use(extent, "released")[:, extent.pages] -= 1
        self._used = None

    def _part_in_use(self, extent: PageRange, act: str) -> NDArray[np.int32]:
        """The references in the layers of `extent`. Raises `IntegrityError` where one of its pages is free."""
        part = self.references[extent.layers.start : extent.layers.stop]
        if (part[:, extent.pages] < 1).any():
            raise IntegrityError(f"{act} pages that are free: {extent.pages.tolist()} in layers {extent.layers}")
        return part


def _first_run(free: NDArray[np.bool_], need: int) -> NDArray[np.int64]:
    """The first `need` consecutive free pages, or the first `need` free ones where no run is long enough."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    fits = np.flatnonzero(ends - starts >= need)
    if len(fits):
        return np.arange(starts[fits[0]], starts[fits[0]] + need)
    return np.flatnonzero(free)[:need]
