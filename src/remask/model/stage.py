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
    """The rows of a pass that adapters change."""

    runs: tuple[tuple[str, slice], ...] = ()  # names of adapters with consecutive rows
    rows: Tensor | None = None  # int64 [n]: the rows that are computed, if only the device knows them; None: all

    @classmethod
    def of(cls, counts: Iterable[tuple[str | None, int]]) -> "AdapterRows":
        """The rows of canvases that follow one another, by the adapter and the number of rows of each."""
        runs = list[tuple[str, slice]]()
        position = 0
        for name, count in counts:
            if name is not None and count:
                continues = runs and runs[-1][0] == name and runs[-1][1].stop == position
                start = runs.pop()[1].start if continues else position
                runs.append((name, slice(start, position + count)))
            position += count
        return cls(tuple(runs))

    def subset(self, rows: Tensor) -> "AdapterRows":
        """The same adapters for a pass that computes only `rows`, int64 [n]. The host does not wait."""
        if not self.runs:
            return self
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def add(
        self, out: Tensor, x: Tensor, changes: Mapping[str, LowRank], arithmetic: Arithmetic, part: slice
    ) -> Tensor:
        """Add the products of adapters to `out` [N, M], in place, and return it.

        `out` is the product of `x` [N, K] with `part` of the rows of a matrix, and `changes` has the low-rank changes
        of that matrix by adapter.
        """
        for name, run in self.runs:
            change = changes.get(name)
            if change is None:
                continue
            product = arithmetic.linear(x[run] if self.rows is None else x, change.down)
            product = arithmetic.linear(product, change.up[part])
            if self.rows is None:
                out[run] += product
            else:
                is_changed = (self.rows >= run.start) & (self.rows < run.stop)
                out += product.where(is_changed[:, None], 0)
        return out


NO_ADAPTERS = AdapterRows()
Run: TypeAlias = slice  # consecutive slots of the pool
Index: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Restore:
    """Rows of a stage that start from a stored hidden state."""

    rows: slice | Tensor
    states: Tensor  # [P, D], of consecutive positions of the canvas
    positions: slice | Tensor  # of the rows, in `states`


@dataclass(frozen=True, slots=True)
class Save:
    """Rows of a stage whose input hidden state is copied into `states`."""

    rows: slice
    states: Tensor  # [T, D], of the whole canvas
    positions: slice | Tensor  # of the rows, on the canvas


@dataclass(frozen=True, slots=True)
class Pick:
    """A candidate rows of several canvases, of which each layer computes the S that changed most.

    The number of rows is fixed for each canvas. Candidates are in the order of the canvases. They are sorted by canvas
    and then by similarity, and those at `order` are picked. V (with `keys` K) is compared, and written for all A rows.

    Layer i of the stage picks rows if `phase` + i is a multiple of `every`. The other layers compute the rows that were
    picked last, and write V of these alone.
    """

    rows: Tensor  # int64 [A], rows of the stage
    owner: Tensor  # int64 [A], number of the canvas
    order: Tensor  # int64 [S], into the sorted rows
    target: Tensor  # int64 [S], indices of the picked rows in `Partial.computed`
    keys: bool
    every: int = 1
    phase: int = 0
    # int64 [S] each, the rows that each layer picked, in the order of the layers. The transformer appends them: once V
    # of a layer is written, nothing else tells which rows had changed
    picked_rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The K/V slots that N rows of sliding layers may see."""

    slots: Tensor  # int64 [S], of whole canvases, one canvas after the other
    # int64 [3, N], indices into `slots`: of each row's own position, the first position that it may see, and the end
    places: Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """A stage in which C of the rows are computed, in the order of the canvases. The others add cached outputs."""

    computed: Tensor  # int64 [C], rows of the stage; each of `picks` overwrites those at its `target`
    picks: tuple[Pick, ...]
    slots: Tensor  # int64 [N], of all rows of the stage
    neighbours: Neighbours | None = None  # of the N rows, for sliding layers whose rows are picked on the device


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers over N rows: the rows of all canvases of the step, one canvas after the other."""

    layers: range
    positions: Tensor  # int64 [N], on the canvases, for RoPE
    slots: Tensor  # int64 [W], of the written rows' K/V in each of `layers`, if all rows are computed
    # int64 [W]: computed rows whose K/V (and, with `outputs`, outputs) are written; None: all
    written_rows: Tensor | None
    carry: tuple[Tensor, Tensor | None] | None  # (rows of the stage before, rows here); None: the same rows
    work: WorkList  # the attention of its rows in layers with full attention
    sliding_work: WorkList | None = None  # in sliding layers; None: there are none, or `partial.neighbours` is used
    restore: tuple[Restore, ...] = ()
    save: tuple[Save, ...] = ()
    outputs: bool = False  # attention and FFN outputs of computed rows are cached
    partial: Partial | None = None  # None: all rows are computed. Else rows of `work` are the computed ones
    adapters: AdapterRows = NO_ADAPTERS
    # int64 [N]: 1 for rows that are denoised, 0 for final ones; None: `layer_scales` is off
    roles: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Signals:
    """The rows of the first stage that are denoised, on a model with self-conditioning."""

    rows: Tensor  # int64 [n]
    slots: Tensor  # int64 [n], of `Pool.signals`; the spare one if nothing was predicted yet


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over any number of canvases."""

    tokens: Tensor  # int64 [N0]: rows of the first stage
    stages: tuple[Stage, ...]
    predict: Tensor  # int64 [M]: rows of the last stage whose logits are needed
    row_layers: int  # rows that are computed, summed over the layers
    signals: Signals | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows of a stage that a layer computes."""

    cos: Tensor  # for RoPE, [N, 1, R / 2], of the model's dtype or wider (`ModelConfig.rope_float32`)
    sin: Tensor  # as `cos`
    slots: Tensor  # int64 [W], of the K/V of the rows that are written. For kernels [N], -1 for rows that are not.
    written_rows: Tensor | None  # int64 [W], the rows that are written; None: all
    outputs: bool  # whether their attention and FFN outputs are cached, addressed like K and V
    adapters: AdapterRows = NO_ADAPTERS
    query_scale: Tensor | None = None  # factor of the queries after RoPE, [N, 1, 1]; None: 1
    roles: Tensor | None = None  # see `Stage.roles`


def runs(slots: Index) -> list[Run]:
    """`slots` as runs of consecutive slots."""
    cuts = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
    edges = [0, *cuts.tolist(), len(slots)]
    return [slice(int(slots[start]), int(slots[stop - 1]) + 1) for start, stop in pairwise(edges)]


def send_run(index: Index, device: torch.device) -> Run | Tensor:
    """`index` as a slice if it is one run, so that it is read in place; otherwise as a tensor on `device`."""
    slices = runs(index)
    return slices[0] if len(slices) == 1 else send(index, device)
