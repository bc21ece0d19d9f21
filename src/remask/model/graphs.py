"""Layers as device graphs: the launches of a layer are captured once and repeated in one launch, for any batch.

A graph knows addresses and numbers of rows, so rows stand in buffers of a few sizes. Rows beyond those of a stage are
spare: they are computed, their K/V go to a slot that no page has, and nobody reads what comes of them.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
# Runs work, and returns what runs its operations again, on the memory that they had the first time, which the caller
# keeps. What work does on the host is not repeated, and it must not wait for the device.
Capture: TypeAlias = Callable[[Work], Work]


def capture_on(device: torch.device) -> Capture:
    """What captures on `device`. Raises `ConfigError` where nothing does."""
    if device.type == "cuda":
        return CudaCapture(device)
    raise ConfigError(f"graphs=True needs a CUDA device, and the device is {device}; leave graphs out")


class CudaCapture:
    """CUDA graphs, which share one pool of memory: they run one after another, and keep nothing between them there."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """See `Capture`. The host waits until the device is idle."""
        work()  # kernels are compiled, and libraries allocate what they need, before anything is captured
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph of an engine that is gone must not be freed during a capture, which would end with an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Stages whose layers compute for long need no graphs: so many products of a weight with a row take an H100 0.8 ms, and
# the eleven launches of a layer took the host beside it 0.4 ms.
MOST_WORK, MOST_ROWS = 3 * 10**11, 4096
MOST_SHAPES = 48  # shapes of stages whose graphs are kept, the last ones used

# Rows, whether outputs are kept, and the sizes of the work lists where a graph holds attention too.
Shape: TypeAlias = tuple[int, bool, tuple[ListSize, ...]]


class Layers(Protocol):
    """The parts of a transformer that graphs repeat; see `Transformer`."""

    part: ModelConfig
    turns: tuple[tuple[Tensor, Tensor], ...]
    slides: tuple[bool, ...]
    growth: Tensor | None

    def project(self, h: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor: ...

    def attend(self, q: Tensor, layer: int, work: WorkList, pool: Pool) -> Tensor: ...

    def finish(self, h: Tensor, attended: Tensor, layer: int, rows: Rows, pool: Pool) -> Tensor: ...

    def sink(self, layer: int) -> Sink | None: ...


class Graphs:
    """Repeats stages in which all rows are computed, over one pool.

    Where attention launches the same for all lists of a size, a graph holds a layer, or all layers where a stage has
    them. Otherwise there are two graphs for each layer, and attention is launched between them as usual. `stages`
    counts the stages that were run, and `captured` the graphs that were made.
    """

    def __init__(self, pool: Pool, capture: Capture, attention: Attention, rows: int = MOST_ROWS) -> None:
        """For layers that attend by `attention`, and stages of at most `rows` rows."""
        self._pool, self._capture, self._rows = pool, capture, rows
        self._attention = attention if isinstance(attention, SizedAttention) else None
        self._buffers: dict[int, _Buffers] = {}
        self._by_shape: OrderedDict[Shape, _ShapeGraphs] = OrderedDict()
        self.stages = self.captured = 0

    def serve(self, stage: Stage, pool: Pool) -> bool:
        """Whether `stage` can be repeated over `pool`. A stage with rows that adapters change cannot."""
        rows, plain = len(stage.positions), stage.partial is None and not stage.adapters.runs
        return pool is self._pool and plain and bool(len(stage.layers)) and 0 < rows <= self._rows

    def run(self, model: Layers, stage: Stage, h: Tensor) -> Tensor:
        """The output of `stage`, [N, D], in new memory. Its rows enter it as `h`, which stays as it is."""
        room = round_up(len(h))
        if room not in self._buffers:
            self._buffers[room] = _Buffers.of(model, room, h)
        buffers = self._buffers[room]
        buffers.enter(model, stage, h, self._pool.spare)
        slots, growth = buffers.slots, buffers.growth
        rows = [Rows(cos, sin, slots, None, stage.outputs, growth=growth) for cos, sin in buffers.turns]
        if self._attention is not None:
            self._run_whole(model, self._attention, stage, buffers.h, rows)
        else:
            self._run_apart(model, stage, buffers, rows)
        self.stages += 1
        return buffers.h[: len(h)].clone()

    def _run_whole(
        self, model: Layers, attention: SizedAttention, stage: Stage, h: Tensor, rows: Sequence[Rows]
    ) -> None:
        """With attention in the graphs."""
        heads, groups, sink = model.part.heads, model.part.kv_heads, model.part.sink is not None
        lists = [stage.work] if stage.near is None else [stage.work, stage.near]
        sizes = [attention.size(work, heads, groups, sink=sink).rounded_up(len(h)) for work in lists]
        own = self._of((len(h), stage.outputs, tuple(sizes)))
        if not own.numbers:
            own.numbers = [torch.empty(sum(size.lengths), dtype=torch.int32, device=h.device) for size in sizes]
        if own.work is not stage.work or own.near is not stage.near:
            for numbers, work, size in zip(own.numbers, lists, sizes, strict=True):
                numbers.copy_(work.once(self._sent, heads, groups, size, h.device))
            own.work, own.near = stage.work, stage.near
        kinds = list(zip(rows, own.numbers, sizes, strict=False))
        every = len(stage.layers) == len(self._pool.k)
        for layers in [stage.layers] if every else [range(layer, layer + 1) for layer in stage.layers]:
            run = partial(_run_layers, model, attention, layers, h, kinds, self._pool)
            self._repeat(own, (layers.start, layers.stop), run)

    def _sent(self, work: WorkList, heads: int, groups: int, size: ListSize, device: torch.device) -> Tensor:
        """The list on the device, where it stays: batches that are alike have the same one."""
        assert self._attention is not None
        return send(self._attention.numbers(work, heads, groups, size), device)

    def _run_apart(self, model: Layers, stage: Stage, buffers: "_Buffers", rows: Sequence[Rows]) -> None:
        """With attention between the graphs."""
        own, pool, count = self._of((len(buffers.h), stage.outputs, ())), self._pool, len(stage.positions)

        def project(layer: int) -> None:
            buffers.q.copy_(model.project(buffers.h, layer, rows[model.slides[layer]], pool))

        def finish(layer: int) -> None:
            model.finish(buffers.h, buffers.attended, layer, rows[model.slides[layer]], pool)

        for layer in stage.layers:
            self._repeat(own, (layer, "project"), partial(project, layer))
            work = stage.near if model.slides[layer] else stage.work
            assert work is not None
            buffers.attended[:count] = model.attend(buffers.q[:count], layer, work, pool)
            self._repeat(own, (layer, "finish"), partial(finish, layer))

    def _of(self, shape: Shape) -> "_ShapeGraphs":
        """The graphs of stages of `shape`. The least recently used ones are dropped where there are too many."""
        graphs = self._by_shape.setdefault(shape, _ShapeGraphs())
        self._by_shape.move_to_end(shape)
        if len(self._by_shape) > MOST_SHAPES:
            self._by_shape.popitem(last=False)
        return graphs

    def _repeat(self, own: "_ShapeGraphs", name: tuple[int, int | str], work: Work) -> None:
        if name in own.graphs:
            own.graphs[name]()
        else:
            own.graphs[name] = self._capture(work)
            self.captured += 1


@dataclass(slots=True)
class _ShapeGraphs:
    """The graphs of one shape, and the lists that they read: those of `work` and `near`."""

    graphs: dict[tuple[int, int | str], Work] = field(default_factory=dict)
    numbers: list[Tensor] = field(default_factory=list)
    work: WorkList | None = None
    near: WorkList | None = None


@dataclass(slots=True)
class _Buffers:
    """Buffers that graphs of B rows read and write."""

    h: Tensor  # hidden states, [B, D]
    q: Tensor  # queries, [B, heads, Dh]
    attended: Tensor  # what they have found, [B, heads * Dh]
    # cos and sin for RoPE, [B, 1, R / 2], of layers that do not slide, and of those that do
    turns: Sequence[Sequence[Tensor]]
    slots: Tensor  # int64 [B]
    growth: Tensor | None = None  # what queries are multiplied by, [B, 1, 1]; None: nothing
    turned: Tensor | None = None  # the positions of which `turns` are
    placed: tuple[Tensor | None, Tensor | None] = (None, None)  # the slots and written rows of which `slots` are

    @classmethod
    def of(cls, model: Layers, rows: int, h: Tensor) -> "_Buffers":
        """For `rows` rows of `model`, whose hidden states are like `h`."""
        heads, channels = model.part.heads, model.part.head_dim
        return cls(
            h=h.new_full((rows, h.shape[1]), torch.nan),
            q=h.new_full((rows, heads, channels), torch.nan),
            attended=h.new_full((rows, heads * channels), torch.nan),
            turns=[[table.new_zeros((rows, *table.shape[1:])) for table in tables] for tables in model.turns],
            slots=torch.zeros(rows, dtype=torch.int64, device=h.device),
            growth=None if model.growth is None else model.growth.new_zeros((rows, 1, 1)),
        )

    def enter(self, model: Layers, stage: Stage, h: Tensor, spare: int) -> None:
        """Take in the rows of `stage`, which enter it as `h`. Rows that write nothing write to the slot `spare`."""
        count = len(h)
        self.h[:count] = h
        if self.turned is not stage.positions:
            for tables, turns in zip(model.turns, self.turns, strict=True):
                for table, buffer in zip(tables, turns, strict=True):
                    torch.index_select(table, 0, stage.positions, out=buffer[:count])
            if self.growth is not None and model.growth is not None:
                torch.index_select(model.growth, 0, stage.positions, out=self.growth[:count])
            self.turned = stage.positions
        if self.placed[0] is not stage.slots or self.placed[1] is not stage.written:
            self.slots.fill_(spare)
            if stage.written is None:
                self.slots[:count] = stage.slots
            else:
                self.slots.index_copy_(0, stage.written, stage.slots)
            self.placed = stage.slots, stage.written


def round_up(rows: int) -> int:
    """The rows of the buffers for `rows` >= 1: a power of two or three quarters of one; above 256 eighths of one too.

    There spare rows take as long as others, and below the time is that of reading the weights.
    """
    power = 1 << (rows - 1).bit_length()
    step = max(1, power // (8 if power > 256 else 4))
    return -(-rows // step) * step


def most_rows(config: ModelConfig) -> int:
    """The most rows of a stage that is repeated: those of buffers, and few where a layer of the model computes long."""
    bound = min(MOST_ROWS, max(1, MOST_WORK * config.layers // config.parameters))
    return next(rows for rows in range(bound, 0, -1) if round_up(rows) == rows)


def graph_bytes(config: ModelConfig, item: int) -> int:
    """Bytes of the buffers for stages of all sizes, with `item` bytes a number."""
    sizes = {round_up(rows) for rows in range(1, most_rows(config) + 1)}
    channels = config.hidden + 2 * config.heads * config.head_dim
    channels += len(config.shapes) * (config.rotary_dim or config.head_dim)
    return sum(sizes) * (channels * item + 8)


def _run_layers(
    model: Layers,
    attention: SizedAttention,
    layers: range,
    h: Tensor,
    kinds: Sequence[tuple[Rows, Tensor, ListSize]],
    pool: Pool,
) -> None:
    for layer in layers:
        rows, numbers, size = kinds[model.slides[layer]]
        q = model.project(h, layer, rows, pool)
        attended = attention.run(q, pool.k[layer], pool.v[layer], numbers, size, model.sink(layer))
        model.finish(h, attended, layer, rows, pool)
