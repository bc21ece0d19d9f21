"""Refcounted pages of K/V slots, counted per layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Extent:
    """Memory for `length` consecutive positions, on the same page numbers in each of `layers`."""

    layers: range
    pages: NDArray[np.int64]
    page_size: int
    length: int

    def slots(self) -> NDArray[np.int64]:
        """The slot of each position, int64 [length]."""
        offsets = np.arange(self.length)
        slots: NDArray[np.int64] = self.pages[offsets // self.page_size] * self.page_size + offsets % self.page_size
        return slots

    def split(self) -> "list[Extent]":
        """One extent for each page. The last one may have fewer tokens than a page."""
        size = self.page_size
        return [
            Extent(self.layers, self.pages[index : index + 1], size, length=min(size, self.length - index * size))
            for index in range(len(self.pages))
        ]

    def below(self, layer: int) -> "Extent":
        """The part of this extent in the layers before `layer`."""
        return Extent(range(self.layers.start, layer), self.pages, self.page_size, self.length)


class PageAllocator:
    """Reference counts of all pages in all layers. It hands out page numbers and holds no tensor.

    Pages are counted per layer, because a request that reads a shared prefix in shallow layers needs its own pages for
    that prefix in deep layers only.
    """

    def __init__(self, layer_count: int, page_count: int, page_size: int) -> None:
        self.page_size = page_size
        self.references = np.zeros((layer_count, page_count), dtype=np.int32)
        self._used: int | None = 0  # None after a change, until `used` counts again

    @property
    def used(self) -> int:
        """Number of pages in use, summed over layers."""
        if self._used is None:
            self._used = int(np.count_nonzero(self.references))
        return self._used

    def pages_for(self, length: int) -> int:
        """Number of pages that `length` consecutive positions take in one layer."""
        return -(-length // self.page_size)

    def allocate(self, length: int, layers: range) -> Extent | None:
        """Claim pages for `length` positions in each of `layers`, with one reference each.

        Consecutive pages are preferred, because attention reads them in place. Returns None if too few pages are free.
        """
        extents = self.find([(length, layers)])
        if extents is None:
            return None
        self.claim(extents[0])
        return extents[0]

    def find(self, demands: Sequence[tuple[int, range]]) -> tuple[Extent, ...] | None:
        """One extent of free pages for each of `demands`, (number of positions, layers). Claims nothing.

        The extents do not overlap. Returns None if too few pages are free.
        """
        is_free = self.references == 0  # [layers, pages]
        extents = []
        for length, layers in demands:
            count = self.pages_for(length)
            layer_rows = is_free[layers.start : layers.stop]
            usable = layer_rows.all(axis=0)
            if usable.sum() < count:
                return None
            pages = _select_pages(usable, count)
            layer_rows[:, pages] = False
            extents.append(Extent(layers, pages, self.page_size, length))
        return tuple(extents)

    def claim(self, extent: Extent) -> None:
        """Give each page of `extent` its first reference.

        Raises `IntegrityError`, and changes nothing, if a page is in use.
        """
        references = self.references[extent.layers.start : extent.layers.stop]
        if (references[:, extent.pages] > 0).any():
            raise IntegrityError(f"claimed pages that are in use: {extent.pages.tolist()} in layers {extent.layers}")
        references[:, extent.pages] = 1
        self._used = None

    def retain(self, extent: Extent) -> None:
        """Add a reference to every page of `extent`. Raises `IntegrityError` if one is not in use."""
        self._references_in_use(extent, "retained")[:, extent.pages] += 1

    def release(self, extent: Extent) -> None:
        """Drop a reference from every page of `extent`. Raises `IntegrityError` if one is free already."""
        self._references_in_use(extent, "released")[:, extent.pages] -= 1
        self._used = None

    def _references_in_use(self, extent: Extent, verb: str) -> NDArray[np.int32]:
        """A view of the references in the layers of `extent`. Raises `IntegrityError` if one of its pages is free."""
        references = self.references[extent.layers.start : extent.layers.stop]
        if (references[:, extent.pages] < 1).any():
            raise IntegrityError(f"{verb} pages that are free: {extent.pages.tolist()} in layers {extent.layers}")
        return references


def _select_pages(is_free: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """The first `count` consecutive free pages, or the first `count` free ones if no run is long enough."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_free, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    long_runs = np.flatnonzero(ends - starts >= count)
    if len(long_runs):
        start = starts[long_runs[0]]
        return np.arange(start, start + count)
    return np.flatnonzero(is_free)[:count]
