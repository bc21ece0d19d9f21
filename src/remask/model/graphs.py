"""Layers as device graphs: the launches of a layer are captured once and repeated in one launch, for any batch.

A graph knows addresses and numbers of rows, so rows stand in buffers of a few sizes. Rows beyond those of a stage are
spare: they are computed, their K/V go to a slot that no page has, and nobody reads their outputs.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from remask.errors import ConfigError
from remask.machine.transfers import send
from remask.model.attention import Attention, ListSize, Sink, SizedAttention
from remask.model.config import ModelConfig
from remask.model.pool import Pool
from remask.model.stage import Rows, Stage
from remask.model.work_list import WorkList

Work: TypeAlias = Callable[[], None]
# Runs `work`, and returns a function that runs its operations again on the same memory, which the caller keeps. What
# `work` does on the host is not repeated, and it must not wait for the device.
Capture: TypeAlias = Callable[[Work], Work]


def capture_on(device: torch.device) -> Capture:
    """The capture for `device`. Raises `ConfigError` if it is not a CUDA device."""
    if device.type == "cuda":
        return CudaCapture(device)
    raise ConfigError(f"graphs=True needs a CUDA device, and the device is {device}; leave graphs out")


class CudaCapture:
    """CUDA graphs that share one pool of memory: they run one after another, and no result stays in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """See `Capture`. The host waits until the device is idle.

        `work` runs once on the current stream, and its second run is captured on another one.
        """
        work()  # the result of this pass; it also compiles kernels, which a capture cannot
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: calls of other threads that a capture forbids, such as allocations, do not make it fail.
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep graphs of a dropped engine from being freed during a capture, which would fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# The most products of a weight with a row in a layer, and rows of a stage: layers that compute for longer need no
# graphs. An H100 takes 0.8 ms for so many products, and its host took 0.4 ms for the eleven launches of a layer.
MAX_WORK, MAX_ROWS = 3 * 10**11, 4096
MAX_SHAPES = 48  # shapes of stages whose graphs are kept, the last used ones

# Rows, whether outputs are cached, and the sizes of the work lists if graphs hold attention too.
Shape: TypeAlias = tuple[int, bool, tuple[ListSize, ...]]


class Layers(Protocol):
    """The parts of a transformer that graphs repeat; see `Transformer`."""

    rank_config: ModelConfig
    rope_tables: tuple[tuple[Tensor, Tensor], ...]
    is_sliding: tuple[bool, ...]
    query_scales: Tensor | None

    def project(self, h: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor: ...

    def attend(self, q: Tensor, layer: int, work: WorkList, pool: Pool) -> Tensor: ...

    def finish_layer(self, h: Tensor, attended: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor: ...

    def sink(self, layer: int) -> Sink | None: ...


class Graphs:
    """Repeats stages in which all rows are computed, over one pool.

    With `SizedAttention` a graph holds a layer, or all layers of a stage that has all of them. Otherwise there are two
    graphs for each layer, and attention is launched between them.
    """

    def __init__(self, pool: Pool, capture: Capture, attention: Attention, rows: int = MAX_ROWS) -> None:
        """For layers that attend by `attention`, and stages of at most `rows` rows."""
        self._pool = pool
        self._capture = capture
        self._max_rows = rows
        self._attention = attention if isinstance(attention, SizedAttention) else None
        self._buffers: dict[int, _Buffers] = {}
        self._by_shape: OrderedDict[Shape, _ShapeGraphs] = OrderedDict()
        self.stage_count = self.capture_count = 0

    def can_repeat(self, stage: Stage, pool: Pool) -> bool:
        """Whether graphs can run `stage` over `pool`: not if some rows are not computed, or adapters change some."""
        if stage.partial is not None or stage.adapters.runs or not len(stage.layers):
            return False
        return pool is self._pool and 0 < len(stage.positions) <= self._max_rows

    def run(self, model: Layers, stage: Stage, h: Tensor) -> Tensor:
        """Run `stage` on the input `h` [N, D] of its first layer. Returns its output [N, D] in new memory.

        Writes K/V and outputs to the pool, and captures graphs of a shape that is new.
        """
        size = round_up(len(h))
        if size not in self._buffers:
            self._buffers[size] = _Buffers.of(model, size, h)
        buffers = self._buffers[size]
        buffers.fill(model, stage, h, self._pool.spare)
        slots, scale = buffers.slots, buffers.query_scale
        rows = [
            Rows(cos=cos, sin=sin, slots=slots, written_rows=None, outputs=stage.outputs, query_scale=scale)
            for cos, sin in buffers.cos_sin
        ]
        if self._attention is not None:
            self._run_with_attention(model, self._attention, stage, buffers.h, rows)
        else:
            self._run_without_attention(model, stage, buffers, rows)
        self.stage_count += 1
        return buffers.h[: len(h)].clone()

    def _run_with_attention(
        self, model: Layers, attention: SizedAttention, stage: Stage, h: Tensor, rows: Sequence[Rows]
    ) -> None:
        """Run `stage` on the buffer `h`, in place, by graphs that hold attention too.

        Work lists are packed and sent only if the graphs of this shape did not read the same ones last.
        """
        heads, groups = model.rank_config.heads, model.rank_config.kv_heads
        has_sink = model.rank_config.sink is not None
        lists = [stage.work] if stage.sliding_work is None else [stage.work, stage.sliding_work]
        sizes = [attention.size(work, heads, groups, sink=has_sink).round_up(len(h)) for work in lists]
        graphs = self._graphs_of((len(h), stage.outputs, tuple(sizes)))
        if not graphs.packed_lists:
            graphs.packed_lists = [torch.empty(sum(size.lengths), dtype=torch.int32, device=h.device) for size in sizes]
        if graphs.work is not stage.work or graphs.sliding_work is not stage.sliding_work:
            for packed, work, size in zip(graphs.packed_lists, lists, sizes, strict=True):
                packed.copy_(work.derive(self._device_list, heads, groups, size, h.device))
            graphs.work, graphs.sliding_work = stage.work, stage.sliding_work
        full_and_sliding = list(zip(rows, graphs.packed_lists, sizes, strict=False))
        has_all_layers = len(stage.layers) == len(self._pool.k)
        for layers in [stage.layers] if has_all_layers else [range(layer, layer + 1) for layer in stage.layers]:
            run = partial(_run_layers, model, attention, layers, h, full_and_sliding, self._pool)
            self._replay(graphs, (layers.start, layers.stop), run)

    def _device_list(self, work: WorkList, heads: int, groups: int, size: ListSize, device: torch.device) -> Tensor:
        """`work`, packed, on `device`. It stays there with the list, which batches of one layout share."""
        assert self._attention is not None
        return send(self._attention.pack(work, heads, groups, size), device)

    def _run_without_attention(self, model: Layers, stage: Stage, buffers: "_Buffers", rows: Sequence[Rows]) -> None:
        """Run `stage` on `buffers.h`, in place, by two graphs a layer, with attention launched between them."""
        graphs = self._graphs_of((len(buffers.h), stage.outputs, ()))
        pool = self._pool
        count = len(stage.positions)

        def project(layer: int) -> None:
            buffers.q.copy_(model.project(buffers.h, layer, rows[-1 if model.is_sliding[layer] else 0], pool))

        def finish_layer(layer: int) -> None:
            model.finish_layer(buffers.h, buffers.attended, layer, rows[-1 if model.is_sliding[layer] else 0], pool)

        for layer in stage.layers:
            self._replay(graphs, (layer, "project"), partial(project, layer))
            work = stage.sliding_work if model.is_sliding[layer] else stage.work
            assert work is not None
            buffers.attended[:count] = model.attend(buffers.q[:count], layer, work, pool)
            self._replay(graphs, (layer, "finish"), partial(finish_layer, layer))

    def _graphs_of(self, shape: Shape) -> "_ShapeGraphs":
        """The graphs of `shape`, made if it is new; then the least recently used ones may be dropped."""
        graphs = self._by_shape.setdefault(shape, _ShapeGraphs())
        self._by_shape.move_to_end(shape)
        if len(self._by_shape) > MAX_SHAPES:
            self._by_shape.popitem(last=False)
        return graphs

    def _replay(self, graphs: "_ShapeGraphs", name: tuple[int, int | str], work: Work) -> None:
        """Run the graph `name`, or run `work` and capture it as that graph."""
        if name in graphs.by_name:
            graphs.by_name[name]()
        else:
            graphs.by_name[name] = self._capture(work)
            self.capture_count += 1


@dataclass(slots=True)
class _ShapeGraphs:
    """The graphs of one shape, and the packed work lists that they read."""

    by_name: dict[tuple[int, int | str], Work] = field(default_factory=dict)
    packed_lists: list[Tensor] = field(default_factory=list)  # of `work` and, if there is one, of `sliding_work`
    work: WorkList | None = None
    sliding_work: WorkList | None = None


@dataclass(slots=True)
class _Buffers:
    """Buffers that graphs of B rows read and write."""

    h: Tensor  # hidden states, [B, D]
    q: Tensor  # queries, [B, heads, Dh]
    attended: Tensor  # results of attention, [B, heads * Dh]
    cos_sin: Sequence[Sequence[Tensor]]  # for RoPE, [B, 1, R / 2] each, in full layers and in sliding ones
    slots: Tensor  # int64 [B]
    query_scale: Tensor | None = None  # factor of queries, [B, 1, 1]; None: 1
    positions: Tensor | None = None  # the stage's positions that `cos_sin` and `query_scale` were made of
    slots_source: tuple[Tensor | None, Tensor | None] = (None, None)  # the stage's slots and written rows in `slots`

    @classmethod
    def of(cls, model: Layers, rows: int, h: Tensor) -> "_Buffers":
        """Buffers for `rows` rows of `model`, of the width, dtype and device of `h`."""
        scales = model.query_scales
        heads, head_dim = model.rank_config.heads, model.rank_config.head_dim
        return cls(
            h=h.new_full((rows, h.shape[1]), torch.nan),
            q=h.new_full((rows, heads, head_dim), torch.nan),
            attended=h.new_full((rows, heads * head_dim), torch.nan),
            cos_sin=[
                [table.new_zeros((rows, *table.shape[1:]), device=h.device) for table in tables]
                for tables in model.rope_tables
            ],
            slots=torch.zeros(rows, dtype=torch.int64, device=h.device),
            query_scale=None if scales is None else scales.new_zeros((rows, 1, 1), device=h.device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        scale = [] if self.query_scale is None else [self.query_scale]
        tensors = [self.h, self.q, self.attended, self.slots, *chain.from_iterable(self.cos_sin), *scale]
        return sum(tensor.nbytes for tensor in tensors)

    def fill(self, model: Layers, stage: Stage, h: Tensor, spare: int) -> None:
        """Copy `h` [N, D], slots and RoPE of the rows of `stage`. Rows that are not written get the slot `spare`."""
        count = len(h)
        self.h[:count] = h
        if self.positions is not stage.positions:
            for tables, buffers in zip(model.rope_tables, self.cos_sin, strict=True):
                for table, buffer in zip(tables, buffers, strict=True):
                    torch.index_select(table, 0, stage.positions, out=buffer[:count])
            if self.query_scale is not None and model.query_scales is not None:
                torch.index_select(model.query_scales, 0, stage.positions, out=self.query_scale[:count])
            self.positions = stage.positions
        if self.slots_source[0] is not stage.slots or self.slots_source[1] is not stage.written_rows:
            self.slots.fill_(spare)
            if stage.written_rows is None:
                self.slots[:count] = stage.slots
            else:
                self.slots.index_copy_(0, stage.written_rows, stage.slots)
            self.slots_source = stage.slots, stage.written_rows


def round_up(rows: int) -> int:
    """The size of the buffers for `rows` >= 1: a power of two or 3/4 of one; above 256 also 5/8 or 7/8 of one.

    The steps are finer there because spare rows cost time; below, the time is that of reading the weights.
    """
    power = 1 << (rows - 1).bit_length()
    step = max(1, power // (8 if power > 256 else 4))
    return -(-rows // step) * step


def max_rows(config: ModelConfig) -> int:
    """The most rows of a stage that graphs run, a size of buffers: the fewer, the longer a layer computes."""
    bound = min(MAX_ROWS, max(1, MAX_WORK * config.layers // config.parameters))
    return next(rows for rows in range(bound, 0, -1) if round_up(rows) == rows)


def graph_bytes(model: Layers, dtype: torch.dtype, rows: int) -> int:
    """Bytes of the `_Buffers` of all sizes together, for stages of at most `rows` rows; hidden states have `dtype`."""
    h = torch.empty((1, model.rank_config.hidden), dtype=dtype, device="meta")  # takes no memory, nor do its buffers
    return sum(_Buffers.of(model, size, h).nbytes for size in {round_up(count) for count in range(1, rows + 1)})


def _run_layers(
    model: Layers,
    attention: SizedAttention,
    layers: range,
    h: Tensor,
    full_and_sliding: Sequence[tuple[Rows, Tensor, ListSize]],
    pool: Pool,
) -> None:
    """Run `layers` on `h` [B, D], in place. Full layers read the first entry of `full_and_sliding`, others the last."""
    for layer in layers:
        rows, packed, size = full_and_sliding[-1 if model.is_sliding[layer] else 0]
        q = model.project(h, layer, rows, pool)
        attended = attention.run(q, pool.k[layer], pool.v[layer], packed, size, model.sink(layer))
        model.finish_layer(h, attended, layer, rows, pool)
