"""Products of rows with matrices of whole numbers on a CPU: kernels for eight and four bits, and which is fast here."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.model.sizes import GROUP, GROUP_BYTES, TILE

ROWS = (1, 32, 128)
SIDE = 1024  # rows and columns of the matrix that is measured
# How much faster a kernel must be to be taken in the place of another. Answers differ in their last bits, so noise must
# not choose.
MARGIN = 1.5
TINY = 1e-12  # least scale: rows of zeros have one all the same
_REPEATS = 5
_OTHERS = 2**23  # numbers of float32 that drive a matrix out of caches

Speeds: TypeAlias = tuple[float, ...]  # how many times as fast as float32, with each number of `ROWS`


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel for products of some kind on this machine."""

    name: Literal["fbgemm", "int_mm", "float32"]  # which one
    reduced: bool = False  # rows are quantised to seven bits, as the processor's instructions overflow on eight
    speed: Speeds = ()  # how many times as fast as float32 it was

    def __str__(self) -> str:
        """For the log."""
        bits = " on rows of seven bits" if self.reduced else ""
        speed = ", ".join(f"{times:.1f}" for times in self.speed)
        return f"{self.name}{bits}, {speed} times as fast as float32 at {', '.join(map(str, ROWS))} rows"


def speeds(act: Callable[[Tensor], Tensor]) -> Speeds:
    """How fast `act`, a product of rows [N, `SIDE`] with a matrix of as many rows, is beside float32."""
    return tuple(wide / seconds for wide, seconds in zip(_float32(), _seconds(act), strict=True))


@cache
def dtype_speeds(dtype: torch.dtype) -> Speeds:
    """How fast products of `dtype` are."""
    if dtype == torch.float32:
        return (1.0,) * len(ROWS)
    matrix = torch.ones((SIDE, SIDE), dtype=dtype)
    return speeds(lambda x: F.linear(x.to(dtype), matrix))


def average(speed: Speeds) -> float:
    """One number for them: the geometric mean, as few rows count as much as many."""
    return prod(speed) ** (1 / len(speed))


@cache
def _float32() -> tuple[float, ...]:
    matrix = torch.ones((SIDE, SIDE))
    return _seconds(lambda x: F.linear(x, matrix))


def _seconds(act: Callable[[Tensor], Tensor]) -> tuple[float, ...]:
    """The shortest time of `act` with each number of rows; the first call, which may make a kernel, does not count."""
    generator, shortest = torch.Generator().manual_seed(0), []
    others = torch.ones(_OTHERS)
    with torch.inference_mode():
        for count in ROWS:
            x, times = torch.randn((count, SIDE), generator=generator), []
            act(x)
            for _ in range(_REPEATS):
                if count == 1:  # reading the matrix is the work then, and a model's comes from memory
                    others.sum()
                start = time.perf_counter()
                act(x)
                times.append(time.perf_counter() - start)
            shortest.append(min(times))
    return tuple(shortest)


@cache
def int8_kernel() -> Kernel:
    """The kernel of this process. The first call measures, which takes about two tenths of a second."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (SIDE, SIDE), dtype=torch.int8, generator=generator)
    scales = torch.ones(SIDE)
    plain = Kernel("int_mm", int_mm_limit() < 127, speeds(lambda x: int_mm_product(x, values, scales)))
    reduced = reduced_rows()
    if reduced is None:
        return plain
    packed = int8_pack(values, scales)
    quick = Kernel("fbgemm", reduced, speeds(lambda x: int8_product(x, [packed], reduced)))
    return plain if average(plain.speed) > MARGIN * average(quick.speed) else quick


def int8_pack(values: Tensor, scales: Tensor) -> Any:
    """A matrix [M, K] of int8 with a scale for each row, in the order of FBGEMM's kernel."""
    with _quietly():
        # The type of quantised tensors is on its way out of PyTorch, and nothing else hands over a scale a row.
        zeros = torch.zeros(len(values), dtype=torch.int64)
        matrix = torch._make_per_channel_quantized_tensor(values.contiguous(), scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(matrix, None)


def int8_unpack(packed: Any) -> tuple[Tensor, Tensor]:
    """A copy of what `int8_pack` was given."""
    with _quietly():
        values, _ = torch.ops.quantized.linear_unpack(packed)
        return values.int_repr(), values.q_per_channel_scales().float()


def int8_product(x: Tensor, pieces: list[Any], reduced: bool) -> Tensor:
    """Rows `x` [N, K] times the transposes of packed matrices, side by side; of the dtype of `x`.

    FBGEMM quantises all rows by one scale, from the least and the largest number among them: one row that is large
    would leave no bits to the others. So each row is divided by its own largest magnitude before, and multiplied after.
    A row of 1 and -1 is put below them: with it the scale is always the same, and no row's bits depend on the others.
    """
    numbers = x.float()
    largest = numbers.abs().amax(dim=-1, keepdim=True).clamp_min_(TINY)
    # What is not finite would reach all rows by the scale; its own row is told of it by `largest`.
    rows = torch.cat((torch.div(numbers, largest).nan_to_num_(), _ends(x.shape[1])))
    out = [torch.ops.quantized.linear_dynamic(rows, piece, reduced)[:-1] for piece in pieces]
    return (out[0] if len(out) == 1 else torch.cat(out, dim=1)).mul_(largest).to(x.dtype)


@cache
def _ends(columns: int) -> Tensor:
    with torch.inference_mode(False):  # so that products outside it take it too
        row = torch.zeros((1, columns))
        row[0, 0], row[0, 1] = 1, -1
        return row


def whole_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [N, K] as whole numbers of int8 that `torch._int_mm` multiplies without overflow, and their scales [N, 1].

    What is not finite in a row is told by its scale.
    """
    limit, numbers = int_mm_limit(), x.float()
    scales = (numbers.abs().amax(dim=-1, keepdim=True) / limit).clamp_min_(TINY)
    return (numbers / scales).round_().to(torch.int8), scales


def int_mm_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Rows `x` [N, K] times the transpose of `values` [M, K] of int8 with a scale for each row, by `torch._int_mm`."""
    rows, by = whole_rows(x)
    # With the matrix first few rows take half the time.
    return (torch._int_mm(values, rows.t()).t().contiguous() * by).mul_(scales).to(x.dtype)


@cache
def int_mm_limit() -> int:
    """The largest magnitude of rows that `torch._int_mm` multiplies with a matrix of int8 without overflow.

    Without VNNI, oneDNN adds two products of a number from 0 to 255 and a signed one in sixteen bits.
    """
    largest = torch.full((16, 64), 127, dtype=torch.int8)
    return 127 if int(torch._int_mm(largest, largest[:1].t())[0, 0]) == 127 * 127 * 64 else 63


def reduced_rows() -> bool | None:
    """Whether FBGEMM needs rows of seven bits; None where there is no FBGEMM.

    Without VNNI it adds two products in sixteen bits, which overflow where neighbours are large. With seven bits they
    never do.
    """
    if torch.backends.quantized.engine not in ("fbgemm", "x86"):
        return None
    try:
        largest = int8_pack(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16))
        sums = int8_product(torch.ones((1, 64)), [largest], False)
    except (RuntimeError, AttributeError):
        return None
    return float(sums[0, 0]) < 0.9 * 127 * 64


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


_LARGEST = 126  # of a number in its row's unit: one less than 127, as steps and offsets are rounded
# What zero is unpacked as. The low byte of what is left without its fraction is the nearest whole number around zero.
_MIDDLE = 256.5
_TOLERANCE = 0.1  # of a product whose rows are rounded to seven bits
# PyTorch's function for tables of embeddings, whose rows our groups are; it returns float32.
_UNPACK = torch.ops.quantized.embedding_bag_4bit_unpack.default


def int4_pack(values: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """The groups [m, K / 32 x `GROUP_BYTES`] of codes [m, K], and the unit of each row.

    The number of a code is (code - 8) x scale + zero. Codes of a group are counted from its least one, so that its
    offset is one of its numbers.
    """
    grouped = values.view(len(values), -1, GROUP)
    low, high = grouped.aminmax(dim=-1)
    first, last = (zeros + (code.float() - 8) * scales for code in (low, high))
    units = (torch.maximum(first.abs(), last.abs()).amax(dim=-1) / _LARGEST).clamp_min(TINY)
    # A group of one number may have any step.
    steps = torch.where(high > low, scales / units[:, None], 0.0)
    offsets = first / units[:, None] + _MIDDLE
    constants = torch.stack((steps, offsets), dim=-1).half().view(torch.uint8)
    codes = grouped - low[..., None]
    return torch.cat((codes[..., ::2] | (codes[..., 1::2] << 4), constants), dim=-1).flatten(1), units


def int4_product(x: Tensor, groups: Tensor, units: Tensor, by: str) -> Tensor:
    """Rows `x` [N, K] times the transpose of a packed matrix [M, K]; of the dtype of `x`.

    With `int_mm` each row is rounded to whole numbers by a scale of its own, and has the same bits in any company.
    """
    columns = x.shape[1]
    step = -(-len(groups) // max(1, round(len(groups) * columns / TILE)))  # rows of a tile, which are all alike
    parts = torch.split(groups.view(-1, GROUP_BYTES), step * (columns // GROUP))
    if by == "float32":
        rows = x.float()
        products = [F.linear(rows, _UNPACK(part).sub_(_MIDDLE).view(-1, columns)) for part in parts]
        return torch.cat(products, dim=1).mul_(units).to(x.dtype)
    rows, scales = whole_rows(x)
    sums = torch.empty((len(groups), len(x)), dtype=torch.int32)
    tile = torch.empty((step, columns), dtype=torch.int8)
    for part, out in zip(parts, torch.split(sums, step), strict=True):
        matrix = tile[: len(out)]
        matrix.view(-1, GROUP).copy_(_UNPACK(part))
        torch._int_mm(matrix, rows.t(), out=out)
    return (sums.t().contiguous() * scales).mul_(units).to(x.dtype)


@cache
def int4_kernel() -> Kernel:
    """The kernel of this process. The first call measures, which takes about two tenths of a second.

    Rows stay float32 where `torch._int_mm` is slow, or where a number beyond 127 does not become its low byte, which
    no rule says.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (SIDE, SIDE), dtype=torch.uint8, generator=generator)
    constants = torch.ones((SIDE, SIDE // GROUP))
    groups, units = int4_pack(codes, constants, constants)
    wide = Kernel("float32", speed=speeds(lambda x: int4_product(x, groups, units, "float32")))
    x = torch.randn((1, SIDE), generator=generator)
    exact, rounded = (int4_product(x, groups, units, by) for by in ("float32", "int_mm"))
    if float((rounded - exact).norm()) > _TOLERANCE * float(exact.norm()):
        return wide
    whole = Kernel("int_mm", int_mm_limit() < 127, speeds(lambda x: int4_product(x, groups, units, "int_mm")))
    return wide if average(wide.speed) > MARGIN * average(whole.speed) else whole
