"""A packed step: what the transformer executes. Index tensors and slices only; no policy is known by name here."""

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Run: TypeAlias = slice  # consecutive slots of the pool


@dataclass(frozen=True, slots=True)
class Direct:
    """Rows of one canvas that attend to one set of slots: a run that is read in place, or scattered slots."""

    rows: slice
    keys: Run | Tensor
    visible: Tensor | None = None  # bool [rows, keys]; None: every row sees them all


@dataclass(frozen=True, slots=True)
class Cascade:
    """Rows of several canvases that attend to common runs, and each canvas to slots of its own.

    The common runs are read once for all rows. `own` holds G canvases' slots, padded to M; `queries` the G canvases'
    rows relative to `rows.start`, padded to N. Padding repeats an entry, `hidden` marks padded slots and those that a
    row does not see. `back` undoes the padding of the rows. Where all canvases have as many rows and slots, and see
    all, nothing is padded and these three are None.
    """

    rows: slice
    common: tuple[Run, ...]
    own: Tensor  # int64 [G, M]
    queries: Tensor | None  # int64 [G, N]
    hidden: Tensor | None  # bool [G, N or 1, M]
    back: Tensor | None  # int64 [rows], into the G * N padded rows


Segments: TypeAlias = tuple[Direct | Cascade, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Rows of a stage that start from a state kept elsewhere, read in place."""

    rows: slice | Tensor
    states: Tensor  # [T, D], of the whole canvas
    positions: slice | Tensor  # those of the rows


@dataclass(frozen=True, slots=True)
class Save:
    """Rows of a stage whose input hidden state is copied out, into `states`."""

    rows: slice
    states: Tensor  # [T, D], of the whole canvas
    positions: slice | Tensor  # those of the rows


@dataclass(frozen=True, slots=True)
class Pick:
    """Rows of which each canvas' share that moved most is computed: A rows of R canvases, S of them chosen.

    The A rows stand canvas after canvas. Sorted by canvas and then by similarity, those at `order` are chosen; they go
    to `target` among the computed rows. What is compared, and renewed for all A, is V, or K where `keys` says so.
    """

    rows: Tensor  # int64 [A], among the stage's rows
    owner: Tensor  # int64 [A], number of the canvas
    order: Tensor  # int64 [S]
    target: Tensor  # int64 [S]
    keys: bool


@dataclass(frozen=True, slots=True)
class Partial:
    """A stage in which not all rows are computed: C are, canvas after canvas, the others add cached outputs."""

    computed: Tensor  # int64 [C], among the stage's rows; entries that `picks` fill are placeholders
    picks: tuple[Pick, ...]
    slots: Tensor  # int64 [N], of all rows of the stage


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of layers over one flat set of N rows, those of all canvases of the step one after the other."""

    layers: range
    positions: Tensor  # int64 [N], on their canvases: for RoPE
    slots: Tensor  # int64 [W]: where the written rows' K/V live, in each of `layers`, if all rows are computed
    written: Tensor | None  # int64 [W]: computed rows whose K/V and outputs are written; None: all
    carry: tuple[Tensor, Tensor | None] | None  # (rows of the stage before, rows here); None: the same rows go on
    segments: Segments
    restore: tuple[Restore, ...] = ()
    save: tuple[Save, ...] = ()
    outputs: bool = False  # attention and FFN outputs of computed rows are kept
    partial: Partial | None = None  # None: all rows are computed. Else `segments` are over the computed ones


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over any number of canvases."""

    tokens: Tensor  # int64 [N0]: rows of the first stage
    stages: tuple[Stage, ...]
    predict: Tensor  # int64 [M]: rows of the last stage whose logits are wanted
    row_layers: int
