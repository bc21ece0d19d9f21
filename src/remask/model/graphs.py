"""Layers as device graphs: the launches of a layer are captured once and repeated in one launch, for any batch.

A graph knows addresses and numbers of rows, so rows stand in buffers of a few sizes. Rows beyond those of a stage are
spare: they are computed, their K/V go to a slot that no page has, and nobody reads what comes of them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from remask.machine.transfers import send
from remask.model.attention import Attention, ListSize, Sink, SizedAttention
from remask.model.capture import Capture, Work
from remask.model.config import ModelConfig
from remask.model.pool import Pool
from remask.model.rows import Rows
from remask.model.stage import Stage
from remask.model.work_list import WorkList

MOST_ROWS = 1024  # of a repeated stage; larger ones compute so long that launches do not matter
MOST_SHAPES = 48  # shapes of stages whose graphs are kept, the last ones used

Shape: TypeAlias = tuple[int, bool, ListSize | None]
"""Rows, whether outputs are kept, and the size of the work list where a graph holds attention too."""


class Layers(Protocol):
    """The parts of a transformer that graphs repeat; see `Transformer`."""

    part: ModelConfig
    cos: Tensor
    sin: Tensor

    def project(self, h: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor:
        """The first part of a layer: queries."""
        ...

    def attend(self, q: Tensor, layer: int, work: WorkList, pool: Pool) -> Tensor:
        """Its attention."""
        ...

    def finish(self, h: Tensor, attended: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor:
        """The rest of it, which changes `h` in place."""
        ...

    def sink(self, layer: int) -> Sink | None:
        """What every row attends to."""
        ...


class Graphs:
    """Repeats stages in which all rows are computed, over one pool.

    Where attention launches the same for all lists of a size, a graph holds a layer, or all layers where a stage has
    them. Otherwise there are two graphs for each layer, and attention is launched between them as usual.

    Attributes:
        stages: how many stages were run by graphs.
        captured: how many graphs were made.
    """

    def __init__(self, pool: Pool, capture: Capture, attention: Attention) -> None:
        """For layers that attend by `attention`."""
        self._pool, self._capture = pool, capture
        self._attention = attention if isinstance(attention, SizedAttention) else None
        self._buffers: dict[int, _Buffers] = {}
        self._kept: OrderedDict[Shape, _Kept] = OrderedDict()
        self.stages = self.captured = 0

    def serve(self, stage: Stage, pool: Pool) -> bool:
        """Whether `stage` can be repeated over `pool`."""
        rows = len(stage.positions)
        return pool is self._pool and stage.partial is None and bool(len(stage.layers)) and 0 < rows <= MOST_ROWS

    def run(self, model: Layers, stage: Stage, h: Tensor) -> Tensor:
        """The output of `stage`, [N, D], in new memory. Its rows enter it as `h`, which stays as it is."""
        room = round_up(len(h))
        if room not in self._buffers:
            self._buffers[room] = _Buffers.of(model, room, h)
        buffers = self._buffers[room]
        buffers.enter(model, stage, h, self._pool.spare)
        rows = Rows(buffers.cos, buffers.sin, buffers.slots, None, stage.outputs)
        if self._attention is not None:
            self._run_whole(model, self._attention, stage, buffers.h, rows)
        else:
            self._run_apart(model, stage, buffers, rows)
        self.stages += 1
        return buffers.h[: len(h)].clone()

    def _run_whole(self, model: Layers, attention: SizedAttention, stage: Stage, h: Tensor, rows: Rows) -> None:
        """With attention in the graphs."""
        heads, groups = model.part.heads, model.part.kv_heads
        size = attention.size(stage.work, heads, groups, sink=model.part.sink).rounded_up(len(h))
        kept = self._of((len(h), stage.outputs, size))
        if kept.numbers is None:
            kept.numbers = torch.empty(sum(size.lengths), dtype=torch.int32, device=h.device)
        if kept.work is not stage.work:
            kept.numbers.copy_(send(attention.numbers(stage.work, heads, groups, size), h.device))
            kept.work = stage.work
        every = len(stage.layers) == len(self._pool.k)
        for layers in [stage.layers] if every else [range(layer, layer + 1) for layer in stage.layers]:
            work = partial(_run_layers, model, attention, layers, h, rows, kept.numbers, size, self._pool)
            self._repeat(kept, (layers.start, layers.stop), work)

    def _run_apart(self, model: Layers, stage: Stage, buffers: "_Buffers", rows: Rows) -> None:
        """With attention between the graphs."""
        kept, pool, count = self._of((len(buffers.h), stage.outputs, None)), self._pool, len(stage.positions)

        def project(layer: int) -> None:
            buffers.q.copy_(model.project(buffers.h, layer, rows, pool))

        def finish(layer: int) -> None:
            model.finish(buffers.h, buffers.attended, layer, rows, pool)

        for layer in stage.layers:
            self._repeat(kept, (layer, "project"), partial(project, layer))
            buffers.attended[:count] = model.attend(buffers.q[:count], layer, stage.work, pool)
            self._repeat(kept, (layer, "finish"), partial(finish, layer))

    def _of(self, shape: Shape) -> "_Kept":
        """The graphs of stages of `shape`. The least recently used ones are dropped where there are too many."""
        kept = self._kept.setdefault(shape, _Kept())
        self._kept.move_to_end(shape)
        if len(self._kept) > MOST_SHAPES:
            self._kept.popitem(last=False)
        return kept

    def _repeat(self, kept: "_Kept", name: tuple[int, int | str], work: Work) -> None:
        if name in kept.graphs:
            kept.graphs[name]()
        else:
            kept.graphs[name] = self._capture(work)
            self.captured += 1


@dataclass(slots=True)
class _Kept:
    """The graphs of one shape, and the list that they read: that of `work`."""

    graphs: dict[tuple[int, int | str], Work] = field(default_factory=dict)
    numbers: Tensor | None = None
    work: WorkList | None = None


@dataclass(slots=True)
class _Buffers:
    """Buffers that graphs of B rows read and write.

    Attributes:
        h: hidden states, [B, D].
        q: queries, [B, heads, Dh].
        attended: what they have found, [B, heads * Dh].
        cos: for RoPE, [B, 1, R / 2].
        sin: as `cos`.
        slots: int64 [B].
        known: the indices of a stage of which `cos`, `sin` and `slots` are.
    """

    h: Tensor
    q: Tensor
    attended: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    known: Sequence[Tensor | None] = ()

    @classmethod
    def of(cls, model: Layers, rows: int, h: Tensor) -> "_Buffers":
        """For `rows` rows of `model`, whose hidden states are like `h`."""
        heads, channels = model.part.heads, model.part.head_dim
        return cls(
            h=h.new_full((rows, h.shape[1]), torch.nan),
            q=h.new_full((rows, heads, channels), torch.nan),
            attended=h.new_full((rows, heads * channels), torch.nan),
            cos=model.cos.new_zeros((rows, *model.cos.shape[1:])),
            sin=model.sin.new_zeros((rows, *model.sin.shape[1:])),
            slots=torch.zeros(rows, dtype=torch.int64, device=h.device),
        )

    def enter(self, model: Layers, stage: Stage, h: Tensor, spare: int) -> None:
        """Take in the rows of `stage`, which enter it as `h`. Rows that write nothing write to the slot `spare`."""
        count = len(h)
        self.h[:count] = h
        indices = (stage.positions, stage.slots, stage.written)
        if len(self.known) == len(indices) and all(
            one is other for one, other in zip(self.known, indices, strict=True)
        ):
            return
        torch.index_select(model.cos, 0, stage.positions, out=self.cos[:count])
        torch.index_select(model.sin, 0, stage.positions, out=self.sin[:count])
        self.slots.fill_(spare)
        if stage.written is None:
            self.slots[:count] = stage.slots
        else:
            self.slots.index_copy_(0, stage.written, stage.slots)
        self.known = indices

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(each.nbytes for each in (self.h, self.q, self.attended, self.cos, self.sin, self.slots))


def round_up(rows: int) -> int:
    """The rows of the buffers for `rows` >= 1: a power of two, or three quarters of one."""
    power = 1 << (rows - 1).bit_length()
    return max(1, power * 3 // 4) if rows <= power * 3 // 4 else power


def graph_bytes(config: ModelConfig, item: int) -> int:
    """Bytes of the buffers for stages of all sizes, with `item` bytes a number."""
    sizes = {round_up(rows) for rows in range(1, MOST_ROWS + 1)}
    channels = config.hidden + 2 * config.heads * config.head_dim + (config.rotary_dim or config.head_dim)
    return sum(sizes) * (channels * item + 8)


def _run_layers(
    model: Layers,
    attention: SizedAttention,
    layers: range,
    h: Tensor,
    rows: Rows,
    numbers: Tensor,
    size: ListSize,
    pool: Pool,
) -> None:
    for layer in layers:
        q = model.project(h, layer, rows, pool)
        attended = attention.run(q, pool.k[layer], pool.v[layer], numbers, size, model.sink(layer))
        model.finish(h, attended, layer, rows, pool)
