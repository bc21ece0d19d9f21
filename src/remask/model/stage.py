"""A packed step, which the transformer executes: index tensors, slices and work lists. It names no policy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.model.arithmetic import Arithmetic
from remask.model.weights import LowRank
from remask.model.work_list import WorkList


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows of a pass the adapters change. All other rows cost nothing."""

    runs: tuple[tuple[str, slice], ...] = ()  # names of adapters with consecutive rows
    chosen: Tensor | None = None  # int64 [n]: the rows that are multiplied, where only the device knows them; None: all

    @classmethod
    def of(cls, counts: Iterable[tuple[str | None, int]]) -> "AdapterRows":
        """For canvases with so many rows each, one after the other, and the adapters of their requests."""
        runs, at = list[tuple[str, slice]](), 0
        for name, count in counts:
            if name is not None and count:
                joins = runs and runs[-1][0] == name and runs[-1][1].stop == at
                start = runs.pop()[1].start if joins else at
                runs.append((name, slice(start, at + count)))
            at += count
        return cls(tuple(runs))

    def among(self, rows: Tensor) -> "AdapterRows":
        """The same for some of the rows, int64 [n]. The host does not wait."""
        if not self.runs:
            return self
        return replace(self, chosen=rows if self.chosen is None else self.chosen[rows])

    def add(
        self, out: Tensor, x: Tensor, changes: Mapping[str, LowRank], arithmetic: Arithmetic, part: slice
    ) -> Tensor:
        """`out` [N, M], the product of `x` [N, K] with `part` of a matrix' rows, with what `changes` add, in place."""
        for name, run in self.runs:
            change = changes.get(name)
            if change is None:
                continue
            rows = x[run] if self.chosen is None else x
            added = arithmetic.linear(arithmetic.linear(rows, change.down), change.up[part])
            if self.chosen is None:
                out[run] += added
            else:
                inside = (self.chosen >= run.start) & (self.chosen < run.stop)
                out += added.where(inside[:, None], 0)
        return out


NO_ADAPTERS = AdapterRows()
Run: TypeAlias = slice  # consecutive slots of the pool
Index: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Restore:
    """Rows of a stage that start from a stored hidden state."""

    rows: slice | Tensor
    states: Tensor  # [P, D], of consecutive positions of the canvas
    positions: slice | Tensor  # of the rows, among those


@dataclass(frozen=True, slots=True)
class Save:
    """Rows of a stage whose input hidden state is copied into `states`."""

    rows: slice
    states: Tensor  # [T, D], of the whole canvas
    positions: slice | Tensor  # of the rows, on the canvas


@dataclass(frozen=True, slots=True)
class Pick:
    """A rows of several canvases, of which the S rows that changed most are computed, a fixed number of each canvas.

    The A rows are in the order of the canvases. They are sorted by canvas and then by similarity, and the rows at
    `order` are chosen. These take the places `target` among the computed rows. V is compared, and written for all A
    rows; with `keys` it is K. `chosen` takes in what the layers of the stage choose, in their order: once V of a layer
    is written, nothing else tells which rows had moved.

    Layer i of the stage chooses where `phase` + i is a multiple of `every`. The others take the rows that were chosen
    last, and write their V with them.
    """

    rows: Tensor  # int64 [A], among the stage's rows
    owner: Tensor  # int64 [A], number of the canvas
    order: Tensor  # int64 [S]
    target: Tensor  # int64 [S]
    keys: bool
    every: int = 1
    phase: int = 0
    chosen: list[Tensor] = field(default_factory=list)  # int64 [S] each, among the stage's rows


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Where the neighbours of N rows have their K/V."""

    slots: Tensor  # int64 [S], those of whole canvases, one canvas after the other
    # int64 [3, N], among `slots`: of each row's own position, of the first that its row may see, and of the first
    # behind these
    places: Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """A stage in which C of the rows are computed, in the order of the canvases. The others add cached outputs."""

    computed: Tensor  # int64 [C], among the stage's rows; `picks` overwrite placeholders
    picks: tuple[Pick, ...]
    slots: Tensor  # int64 [N], of all rows of the stage
    neighbours: Neighbours | None = None  # of the N rows, for layers that slide and choose rows on the device


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers over N rows: the rows of all canvases of the step, one canvas after the other."""

    layers: range
    positions: Tensor  # int64 [N], on the canvases, for RoPE
    slots: Tensor  # int64 [W], of the written rows' K/V in each of `layers`, if all rows are computed
    written: Tensor | None  # int64 [W]: computed rows whose K/V are projected and, with outputs, kept; None: all
    carry: tuple[Tensor, Tensor | None] | None  # (rows of the stage before, rows here); None: the same rows
    work: WorkList  # what its rows attend to, in layers that do not slide
    near: WorkList | None = None  # and in those that do; None: there is none, or `partial` knows
    restore: tuple[Restore, ...] = ()
    save: tuple[Save, ...] = ()
    outputs: bool = False  # attention and FFN outputs of computed rows are cached
    partial: Partial | None = None  # None: all rows are computed. Else `work` counts the computed ones
    adapters: AdapterRows = NO_ADAPTERS  # which of the N rows adapters change
    roles: Tensor | None = None  # int64 [N]: 1 where a row is denoised, else 0; None: the model makes no difference


@dataclass(frozen=True, slots=True)
class Signals:
    """Rows of the first stage that are denoised, on a model that takes in what was predicted of them."""

    rows: Tensor  # int64 [n]
    slots: Tensor  # int64 [n], of `Pool.signals`; the spare one where nothing was predicted yet


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over any number of canvases."""

    tokens: Tensor  # int64 [N0]: rows of the first stage
    stages: tuple[Stage, ...]
    predict: Tensor  # int64 [M]: rows of the last stage whose logits are needed
    row_layers: int
    signals: Signals | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows of a stage that a layer computes."""

    cos: Tensor  # for RoPE, [N, 1, R / 2], of the model's dtype or wider (`ModelConfig.rope_float32`)
    sin: Tensor  # as `cos`
    slots: Tensor  # int64 [W], where the K/V of the rows that are written go. For kernels [N], and -1 for none.
    written: Tensor | None  # int64 [W], those rows; None: all
    outputs: bool  # whether their attention and FFN outputs are kept, addressed like K and V
    adapters: AdapterRows = NO_ADAPTERS  # which of them adapters change
    growth: Tensor | None = None  # what their queries are multiplied by after RoPE, [N, 1, 1]; None: nothing
    roles: Tensor | None = None  # as of `Stage`


def runs(slots: Index) -> list[Run]:
    """`slots` as runs of consecutive ones."""
    cuts = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
    edges = [0, *cuts.tolist(), len(slots)]
    return [slice(int(slots[a]), int(slots[b - 1]) + 1) for a, b in pairwise(edges)]


def send_run(index: Index, device: torch.device) -> Run | Tensor:
    """An index as a slice where it is one run, which is then read in place; else on the device."""
    in_place = runs(index)
    return in_place[0] if len(in_place) == 1 else send(index, device)
