"""Lower bounds of a pass' time on GPUs that need not be there, launch by launch, from shapes and compiled kernels.

    python -m remask_lab gpu-bounds [--shape llada-8b] [--gpu h100]

A launch takes at least the time of its FLOPs at the matrix units' peak, and that of the bytes that it must read and
write. Attention takes at least the issue slots of the instructions of its compiled loop, too. Nothing is run:
a real pass is slower, as products and copies stay below the peaks. Needs Triton.

The page tells, for a full pass and for a cached one of one block a request, the milliseconds of all launches, the share
that attention takes beyond its roof, that of writing and reading partial results alone, and how long the host launches.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from remask.errors import UnknownNameError
from remask.families import preset
from remask.model.config import ModelConfig
from remask.model.work_list import WorkList, WorkListBuilder
from remask_lab.gpu.kernels import Variant, compiled, variants
from remask_lab.gpu.steady import Shape, find_shape
from remask_lab.speed.command import command_parser, run_command

BF16 = 2  # bytes
EAGER_S: Final = 35e-6  # that the host of an H100 took for a launch (`docs/lab/log.md`)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: FLOPs a second of dense bfloat16 products, bytes a second, multiprocessors."""

    flops: float
    bytes: float
    units: int = 132
    target: int = 90

    @property
    def clock(self) -> float:
        """Cycles a second at which the peak holds: a multiprocessor computes 4096 FLOPs a cycle."""
        return self.flops / self.units / 4096


GPUS: Final = {"h100": Gpu(989e12, 3.35e12), "h200": Gpu(989e12, 4.8e12)}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: what it computes and moves at least, and the instructions that its warps issue on one scheduler.

    `partial` are the bytes of partial results among `bytes`.
    """

    name: str
    flops: float
    bytes: float
    issued: float = 0.0
    partial: float = 0.0

    def seconds(self, gpu: Gpu) -> float:
        """The least time that it takes."""
        return max(self.flops / gpu.flops, self.bytes / gpu.bytes, self.issued / gpu.units / gpu.clock)

    def roof(self, gpu: Gpu) -> float:
        """The same if it issued nothing but products, and left no partial results."""
        return max(self.flops / gpu.flops, (self.bytes - self.partial) / gpu.bytes)


def main() -> None:
    """Print the page."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", default="llada-8b")
    parser.add_argument("--gpu", default="h100", help=", ".join(GPUS))
    args = parser.parse_args()
    if args.gpu not in GPUS:
        raise UnknownNameError("GPU", args.gpu, GPUS)
    gpu, shape = GPUS[args.gpu], find_shape(args.shape, torch.device("cpu"))
    config = preset(shape.preset)
    loop = attention_loop(config, gpu)
    print("| pass | launches | ms | attention beyond its roof | partial results | launching eagerly |")
    print("|---|---|---|---|---|---|")
    for requests in shape.batches:
        for name, rows in (("full", shape.canvas), ("cached", shape.block)):
            print(_line(f"{name}, {requests}", list(launches(config, shape, requests, rows, loop)), gpu))


def _line(name: str, found: list[Launch], gpu: Gpu) -> str:
    seconds = sum(each.seconds(gpu) for each in found)
    beyond = sum(each.seconds(gpu) - each.roof(gpu) for each in found)
    partial = sum(each.partial for each in found) / gpu.bytes
    host = len(found) * EAGER_S
    parts = f"{beyond / seconds:.1%} | {partial / seconds:.1%} | {1e3 * host:.1f} ms"
    return f"| {name} | {len(found)} | {1e3 * seconds:.2f} | {parts} |"


def attention_loop(config: ModelConfig, gpu: Gpu) -> tuple[Variant, int]:
    """The attention kernel of `config` in bfloat16, and the instructions of its loop over tiles of slots."""
    for each in variants([config]):
        if each.products and each.dtype == torch.bfloat16:
            return each, compiled(each, gpu.target).loop
    raise AssertionError("every model has attention")


def launches(
    config: ModelConfig, shape: Shape, requests: int, rows: int, loop: tuple[Variant, int]
) -> Iterator[Launch]:
    """Those of a pass over `rows` rows of each of `requests` canvases, of a dense model in bfloat16.

    All rows read their whole canvas, and those of a block predict.
    """
    total, hidden = requests * rows, config.hidden
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    wide = config.intermediate
    attention = list(_attention(config, _work(requests, rows, shape.canvas), requests, shape.canvas, loop))
    for _ in range(config.layers):
        yield _moved("norm", total * 2 * hidden)
        yield _product("qkv", total, hidden, queries + 2 * keys)
        yield _moved("heads", total * 2 * (queries + 2 * keys))
        yield from attention
        yield _product("out", total, queries, hidden)
        yield _moved("add, norm", total * 4 * hidden)
        yield _product("gate, up", total, hidden, 2 * wide)
        yield _moved("gate", total * 3 * wide)
        yield _product("down", total, wide, hidden)
        yield _moved("add", total * 3 * hidden)
    predicted = requests * shape.block
    yield _moved("norm", predicted * 2 * hidden)
    yield _product("head", predicted, hidden, config.vocab)
    yield _moved("choice", predicted * config.vocab)


def _product(name: str, rows: int, inner: int, outer: int) -> Launch:
    return Launch(name, 2 * rows * inner * outer, BF16 * (rows * inner + inner * outer + rows * outer))


def _moved(name: str, numbers: int) -> Launch:
    return Launch(name, 0, BF16 * numbers)


def _work(requests: int, rows: int, canvas: int) -> WorkList:
    builder = WorkListBuilder()
    for number in range(requests):
        builder.add(number * rows, rows, builder.slots(np.arange(canvas) + number * canvas), canvas, None)
    return builder.list()


def _attention(
    config: ModelConfig, work: WorkList, requests: int, canvas: int, loop: tuple[Variant, int]
) -> Iterator[Launch]:
    """`_attend`, and `_merge` where rows have several partial results."""
    from remask.model.attention_triton import TritonAttention

    kernel, instructions = loop
    heads, groups, dim = config.heads, config.kv_heads, config.head_dim
    attention = TritonAttention(config.score_cap)
    size = attention.size(work, heads, groups, sink=config.sink)
    numbers = attention.numbers(work, heads, groups, size)
    slots = numbers[: 5 * size.units].reshape(-1, 5)[:, 3].astype(np.int64)
    tiles = int((-(-slots // kernel.constants["KEYS"])).sum()) * groups
    moved = BF16 * (2 * size.rows * heads * dim + 2 * requests * canvas * groups * dim)
    left = 4.0 * size.outputs * heads * (dim + 1) if size.merged else 0.0
    # A program's warps share the four schedulers of a multiprocessor evenly.
    issued = tiles * instructions * kernel.constants["num_warps"] / 4
    flops = 4.0 * tiles * kernel.constants["ROWS"] * kernel.constants["KEYS"] * dim
    yield Launch("attend", flops, moved + left, issued, left)
    if size.merged:
        yield Launch("merge", 0, left + BF16 * size.rows * heads * dim, partial=left)


if __name__ == "__main__":
    sys.exit(run_command(main))
