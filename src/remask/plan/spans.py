"""Spans: runs of layers over sets of rows, of which a plan is made.

What can be derived from a span is computed once and kept with it, so its arrays must not be written.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.errors import PlanError

Mask: TypeAlias = NDArray[np.bool_]  # [T], one entry per canvas position

Positions: TypeAlias = NDArray[np.int64]  # ascending positions of a canvas


def index_of(positions: Positions) -> slice | Positions:
    """An index of `positions`: a slice if they are consecutive, which copies nothing, or else the positions."""
    if not len(positions):
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first == len(positions) - 1 else positions


def rows_of(positions: range, length: int) -> Mask:
    """A fresh mask of `positions` on a canvas of `length` positions."""
    mask = np.zeros(length, dtype=np.bool_)
    mask[positions.start : positions.stop] = True
    return mask


def neighbours(
    positions: Positions, sees: Positions | int, reach: int, starts: Positions | None = None
) -> tuple[Positions, Positions]:
    """The window of each row at `positions` [N]: its first position and the one after its last, int64 [N] each.

    A window reaches `reach` positions to each side of its row, and ends before the position `sees`. With `starts` [N],
    the first positions of the rows' blocks, it reaches from `reach` positions before the block up to `sees`.
    """
    if starts is not None:
        return np.maximum(starts - reach, 0), np.broadcast_to(sees, positions.shape)
    return np.maximum(positions - reach, 0), np.minimum(positions + reach + 1, sees)


def starts_of(positions: Positions, sees: Positions | None) -> Positions:
    """The first position of the block of each of `positions`, on a block-causal model. `sees` is that of a `Plan`."""
    # The first row of a block is the first that sees as far as the others.
    return np.zeros_like(positions) if sees is None else np.searchsorted(sees, sees[positions])


@dataclass(frozen=True, slots=True)
class TopRho:
    """Computes the `count` rows of `candidates` whose value vectors moved most (dLLM-Cache section 3.2).

    V is projected and renewed for all rows of `candidates`. Q, K, attention and FFN are computed for the chosen rows
    only, and the others add their cached attention and FFN outputs. With `by="key"` K and V change places.

    With `every` > 1 layers share a choice. It is made, and V projected, in the layer `first` and in every `every`-th
    layer after it. The layers between compute the chosen rows, and renew V of these alone. Layers that share a choice
    must have the same pages.
    """

    candidates: Mask  # rows to choose from
    count: int  # how many are computed
    by: Literal["value", "key"] = "value"  # what is compared with the cache
    first: int = 0  # the first layer in which the choice is made
    every: int = 1  # layers from one choice to the next


@dataclass(frozen=True, eq=False)
class Span:
    """One run of layers over one set of rows. Rows in neither `held` nor `pick` are fully computed."""

    layers: range  # the layers that it covers, consecutive
    rows: Mask  # live rows; rows that were not live in the layer before restart from the state saved for layers.start
    frozen: Mask | None = None  # live rows that write no K/V, because theirs are read-only or must not change
    save: Mask | None = None  # rows whose input hidden state at layers.start is saved
    pick: TopRho | None = None  # lets the device choose which of some rows are computed
    held: Mask | None = None  # live rows that project nothing, and add their cached attention and FFN outputs

    @cached_property
    def computed(self) -> Mask:
        """Rows that are fully computed whatever the device picks."""
        rows = self.rows
        if self.held is not None:
            rows = rows & ~self.held
        if self.pick is not None:
            rows = rows & ~self.pick.candidates
        return rows

    @cached_property
    def written(self) -> Mask:
        """The rows of `computed` whose K and V are written."""
        return self.computed if self.frozen is None else self.computed & ~self.frozen

    @cached_property
    def written_index(self) -> slice | Positions:
        """An index of `written` on the canvas."""
        return index_of(np.flatnonzero(self.written))

    @cached_property
    def written_rows(self) -> Positions:
        """The rows of `written`, as indices into the rows of `computed`."""
        return np.flatnonzero(self.written[np.flatnonzero(self.computed)])

    @cached_property
    def positions(self) -> Positions:
        """The positions of the live rows."""
        return np.flatnonzero(self.rows)

    @cached_property
    def index(self) -> slice | Positions:
        """An index of the live rows on the canvas."""
        return index_of(self.positions)

    @cached_property
    def last(self) -> int:
        """The last row that is computed or may be picked; -1 if there is none."""
        rows = self.rows if self.pick is not None else self.computed
        return int(np.flatnonzero(rows)[-1]) if rows.any() else -1

    @cached_property
    def fixed(self) -> int:
        """Number of rows that are fully computed whatever the device picks."""
        return int(np.count_nonzero(self.computed))

    @cached_property
    def writes_all(self) -> bool:
        """Whether every computed row writes its K and V."""
        return self.frozen is None or not (self.computed & self.frozen).any()

    @property
    def count(self) -> int:
        """Number of rows that are computed, picked ones included."""
        return self.fixed + (0 if self.pick is None else self.pick.count)

    @property
    def cost(self) -> int:
        """Row-layers computed; a projection of V or K alone is not counted."""
        return self.count * len(self.layers)

    def live(self, rows: Positions) -> bool:
        """Whether all of the ascending `rows` are live."""
        index = self.index
        if isinstance(index, slice):
            return not len(rows) or bool(index.start <= rows[0] and rows[-1] < index.stop)
        return bool(np.count_nonzero(self.rows[rows]) == len(rows))

    def within(self, layers: range) -> "Span":
        """The span in some of its layers. Derived arrays are shared with this one."""
        _ = self.written_index, self.index, self.last, self.fixed, self.writes_all  # fills the cache that is shared
        part = object.__new__(Span)
        # Rows pass through a new boundary, so states are still saved at the old one.
        save = self.save if layers.start == self.layers.start else None
        vars(part).update(vars(self), layers=layers, save=save)
        return part

    def below(self, stop: int) -> "Span":
        """The span without the positions from `stop` on. A pick chooses at most the rows that remain."""
        lead = np.arange(len(self.rows)) < stop

        def restrict(mask: Mask | None) -> Mask | None:
            return None if mask is None else mask & lead

        pick = self.pick
        if pick is not None:
            candidates = pick.candidates & lead
            pick = replace(pick, candidates=candidates, count=min(pick.count, int(np.count_nonzero(candidates))))
        frozen, save, held = restrict(self.frozen), restrict(self.save), restrict(self.held)
        return Span(self.layers, self.rows & lead, frozen=frozen, save=save, pick=pick, held=held)

    @property
    def masks(self) -> tuple[Mask | None, ...]:
        """All masks, None for those that are not set."""
        return self.rows, self.frozen, self.save, self.held, None if self.pick is None else self.pick.candidates


@dataclass(frozen=True, slots=True)
class Crossing:
    """How rows pass from one span to the next."""

    source: Positions  # the rows that go on, as indices into the live rows of the span before
    target: Positions  # the same rows, as indices into the live rows of the span after
    joining: Positions  # the other rows of the span after, as indices into its live rows
    joining_positions: Positions  # positions of `joining` on the canvas


@lru_cache(maxsize=128)  # canvases with the same spans share the result
def crossing(before: Span, after: Span) -> Crossing:
    """How rows pass from the span `before` to the span `after`."""
    source = after.rows[before.positions].nonzero()[0]
    target = before.rows[after.positions].nonzero()[0]
    joining = (~before.rows[after.positions]).nonzero()[0]
    return Crossing(source, target, joining, after.positions[joining])


class Spans(tuple[Span, ...]):
    """Spans that cover the layers of a model in order.

    Plans that compute the same rows may share one `Spans` object. The ledger then need not check it twice, and only
    tokens and predictions are packed again.
    """

    def __new__(cls, spans: Iterable[Span]) -> "Spans":
        """Returns `spans` itself if it is a `Spans`. Raises `PlanError` on missing or repeated layers."""
        if isinstance(spans, cls):
            return spans
        self = super().__new__(cls, spans)
        if not self:
            raise PlanError("a plan needs at least one span")
        stop = 0
        for span in self:
            if span.layers.start != stop or span.layers.step != 1 or not len(span.layers):
                layers = [span.layers for span in self]
                raise PlanError(f"spans must cover the layers in order without gaps: {layers}")
            stop = span.layers.stop
        return self

    @cached_property
    def layers(self) -> int:
        """Number of layers covered."""
        return self[-1].layers.stop

    @cached_property
    def cost(self) -> int:
        """Row-layers computed."""
        return sum(span.cost for span in self)

    @cached_property
    def widest(self) -> int:
        """Largest number of live rows in any layer."""
        return max(len(span.positions) for span in self)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The different shapes of the masks."""
        return tuple({mask.shape: None for span in self for mask in span.masks if mask is not None})

    @cached_property
    def joins(self) -> tuple[tuple[int, Mask], ...]:
        """Each layer in which rows become live that were not in the layer before, with the mask of these rows."""
        joins = []
        for before, span in pairwise(self):
            if span.rows is not before.rows:
                joining = span.rows & ~before.rows
                if joining.any():
                    joins.append((span.layers.start, joining))
        return tuple(joins)

    @cached_property
    def saves(self) -> bool:
        """Whether hidden states are saved."""
        return any(span.save is not None for span in self)

    @cached_property
    def picks(self) -> bool:
        """Whether rows are chosen on the device."""
        return any(span.pick is not None for span in self)

    @cached_property
    def adds_outputs(self) -> bool:
        """Whether rows may add cached outputs."""
        return any(mask is not None for span in self for mask in (span.pick, span.held))

    def rewrites(self, other: "Spans") -> bool:
        """Whether a pass over these spans overwrites, before it reads, all that a pass over `other` has written."""
        if other.picks or other.saves:
            return False
        for old in other:
            for span in self:
                overlaps = old.layers.start < span.layers.stop and span.layers.start < old.layers.stop
                if overlaps and (old.written & ~span.written).any():
                    return False
        return True

    def at(self, layer: int) -> Span:
        """The span that covers `layer`."""
        return next(span for span in self if layer in span.layers)

    def cut(self, layer: int) -> "Spans":
        """The spans with a boundary before `layer`. Raises `PlanError` unless 0 <= layer <= layers."""
        if not 0 <= layer <= self.layers:
            raise PlanError(f"cannot cut a plan of {self.layers} layers at layer {layer}: use 0 to {self.layers}")
        spans: list[Span] = []
        for span in self:
            start, stop = span.layers.start, span.layers.stop
            if start < layer < stop:
                spans += [span.within(range(start, layer)), span.within(range(layer, stop))]
            else:
                spans.append(span)
        return self if len(spans) == len(self) else Spans(spans)

    def map(self, function: Callable[[Span], Span]) -> "Spans":
        """The results of `function` on each span. Raises `PlanError` if they do not cover the layers in order."""
        return Spans(map(function, self))


class SpanMemo:
    """The spans of the recent plans of one canvas by key. Equal keys must always stand for equal spans."""

    MAX_SPANS = 8  # a policy alternates between very few spans, and spans of earlier blocks are not used again

    def __init__(self) -> None:
        self._spans: OrderedDict[Hashable, Spans] = OrderedDict()  # least recently used first

    def get(self, key: Hashable, make: Callable[[], Iterable[Span]]) -> Spans:
        """The spans stored under `key`. If there are none, `make` is called and its result is stored."""
        spans = self._spans.get(key)
        if spans is not None:
            self._spans.move_to_end(key)
            return spans
        spans = Spans(make())
        self._spans[key] = spans
        if len(self._spans) > self.MAX_SPANS:
            self._spans.popitem(last=False)
        return spans
