"""A packed step, which the transformer executes: index tensors, slices and work lists. It names no policy."""

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from remask.model.work_list import WorkList

Run: TypeAlias = slice
"""Consecutive slots of the pool."""


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
class Partial:
    """A stage in which C of the rows are computed, in the order of the canvases. The others add cached outputs."""

    computed: Tensor  # int64 [C], among the stage's rows; `picks` overwrite placeholders
    picks: tuple[Pick, ...]
    slots: Tensor  # int64 [N], of all rows of the stage


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers over N rows: the rows of all canvases of the step, one canvas after the other."""

    layers: range
    positions: Tensor  # int64 [N], on the canvases, for RoPE
    slots: Tensor  # int64 [W], of the written rows' K/V in each of `layers`, if all rows are computed
    written: Tensor | None  # int64 [W]: computed rows whose K/V are projected and, with outputs, kept; None: all
    carry: tuple[Tensor, Tensor | None] | None  # (rows of the stage before, rows here); None: the same rows
    work: WorkList  # what its rows attend to
    restore: tuple[Restore, ...] = ()
    save: tuple[Save, ...] = ()
    outputs: bool = False  # attention and FFN outputs of computed rows are cached
    partial: Partial | None = None  # None: all rows are computed. Else `work` counts the computed ones


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over any number of canvases."""

    tokens: Tensor  # int64 [N0]: rows of the first stage
    stages: tuple[Stage, ...]
    predict: Tensor  # int64 [M]: rows of the last stage whose logits are needed
    row_layers: int
