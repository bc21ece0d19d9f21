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

ROWS = (1, 32, 128)  # numbers of rows that kernels are measured with
SIDE = 1024  # rows and columns of the measured matrix
# A kernel replaces another one if it is so many times as fast. Kernels differ in the last bits of answers, so noise
# must not decide.
MARGIN = 1.5
TINY = 1e-12  # the smallest scale, of rows of zeros
INT8_LARGEST = 127  # largest magnitude of a number of int8, so that both signs have equally many
INT4_LARGEST, INT4_MIDDLE = 15, 8  # the largest code of int4, and the code of the group's zero
_PROBE = (16, 64)  # rows and columns of the matrices that show whether sums overflow
_REPEATS = 5
_EVICTING = 2**23  # numbers of float32 that evict a matrix from caches

Speeds: TypeAlias = tuple[float, ...]  # how many times as fast as float32, for each number of `ROWS`


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel for products with one kind of quantized matrix on this machine."""

    name: Literal["fbgemm", "int_mm", "float32"]
    reduced: bool = False  # rows are quantized to seven bits, as the processor's instructions overflow on eight
    speed: Speeds = ()

    def __str__(self) -> str:
        """The kernel in the log."""
        bits = " on rows of seven bits" if self.reduced else ""
        speed = ", ".join(f"{ratio:.1f}" for ratio in self.speed)
        return f"{self.name}{bits}, {speed} times as fast as float32 at {', '.join(map(str, ROWS))} rows"


def speeds(product: Callable[[Tensor], Tensor]) -> Speeds:
    """How many times as fast as in float32 `product` multiplies rows [N, `SIDE`] with a matrix [`SIDE`, `SIDE`]."""
    return tuple(float32 / seconds for float32, seconds in zip(_float32_seconds(), _seconds(product), strict=True))


@cache
def dtype_speeds(dtype: torch.dtype) -> Speeds:
    """The speeds of products in `dtype`."""
    if dtype == torch.float32:
        return (1.0,) * len(ROWS)
    matrix = torch.ones((SIDE, SIDE), dtype=dtype)
    return speeds(lambda x: F.linear(x.to(dtype), matrix))


def average(speed: Speeds) -> float:
    """The geometric mean of speeds, in which each number of rows counts equally."""
    return prod(speed) ** (1 / len(speed))


@cache
def _float32_seconds() -> tuple[float, ...]:
    matrix = torch.ones((SIDE, SIDE))
    return _seconds(lambda x: F.linear(x, matrix))


def _seconds(product: Callable[[Tensor], Tensor]) -> tuple[float, ...]:
    """The shortest seconds of `product` for each number of `ROWS`, after a first call that may compile a kernel."""
    generator = torch.Generator().manual_seed(0)
    evicting = torch.ones(_EVICTING)
    minima = []
    with torch.inference_mode():
        for count in ROWS:
            x = torch.randn((count, SIDE), generator=generator)
            times = []
            product(x)
            for _ in range(_REPEATS):
                if count == 1:  # the time is that of reading the matrix, and a model's matrices come from memory
                    evicting.sum()
                start = time.perf_counter()
                product(x)
                times.append(time.perf_counter() - start)
            minima.append(min(times))
    return tuple(minima)


@cache
def int8_kernel() -> Kernel:
    """The kernel for int8 in this process. The first call measures kernels, for about 0.2 seconds."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-INT8_LARGEST, INT8_LARGEST + 1, (SIDE, SIDE), dtype=torch.int8, generator=generator)
    scales = torch.ones(SIDE)
    int_mm = Kernel("int_mm", int_mm_limit() < INT8_LARGEST, speeds(lambda x: int_mm_product(x, values, scales)))
    reduced = needs_reduced_rows()
    if reduced is None:
        return int_mm
    packed = pack_int8(values, scales)
    fbgemm = Kernel("fbgemm", reduced, speeds(lambda x: int8_product(x, [packed], reduced)))
    return int_mm if average(int_mm.speed) > MARGIN * average(fbgemm.speed) else fbgemm


def pack_int8(values: Tensor, scales: Tensor) -> Any:
    """Pack the int8 matrix `values` [M, K], with a scale for each row, `scales` [M], for FBGEMM's kernel.

    Returns FBGEMM's own object, which `int8_product` multiplies and `unpack_int8` reads. Raises `RuntimeError` or
    `AttributeError` if PyTorch has no FBGEMM.
    """
    with _no_warnings():
        # PyTorch deprecates quantized tensors, but nothing else passes a scale for each row to the kernel.
        zeros = torch.zeros(len(values), dtype=torch.int64)
        matrix = torch._make_per_channel_quantized_tensor(values.contiguous(), scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(matrix, None)


def unpack_int8(packed: Any) -> tuple[Tensor, Tensor]:
    """Copies of the int8 values [M, K] and the float32 scales [M] that `pack_int8` has packed."""
    with _no_warnings():
        values, _ = torch.ops.quantized.linear_unpack(packed)
        return values.int_repr(), values.q_per_channel_scales().float()


def int8_product(x: Tensor, matrices: list[Any], reduced: bool) -> Tensor:
    """Rows `x` [N, K] times the transposes of `matrices` of `pack_int8`, side by side: [N, M], of the dtype of `x`.

    If `reduced`, rows are quantized to seven bits, and to eight otherwise (`needs_reduced_rows`).

    FBGEMM quantizes all rows by one scale, from the least and the largest number in them, so a row of large numbers
    would leave few bits to the others. Each row is therefore divided by its largest magnitude first, and multiplied by
    it afterwards. A row with 1 and -1 is appended: it makes the scale constant, so no row depends on the others.
    """
    numbers = x.float()
    largest = numbers.abs().amax(dim=-1, keepdim=True).clamp_min_(TINY)
    # NaN and infinities would reach all rows through the scale; `largest` brings them back into their own row.
    rows = torch.cat((torch.div(numbers, largest).nan_to_num_(), _range_row(x.shape[1])))
    out = [torch.ops.quantized.linear_dynamic(rows, matrix, reduced)[:-1] for matrix in matrices]
    return (out[0] if len(out) == 1 else torch.cat(out, dim=1)).mul_(largest).to(x.dtype)


@cache
def _range_row(columns: int) -> Tensor:
    with torch.inference_mode(False):  # it is cached, and used outside of inference mode too
        row = torch.zeros((1, columns))
        row[0, 0], row[0, 1] = 1, -1
        return row


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [N, K] as int8 that `torch._int_mm` multiplies without overflow, and their scales [N, 1].

    The scale of a row with NaN or infinities is not finite either.
    """
    numbers = x.float()
    scales = (numbers.abs().amax(dim=-1, keepdim=True) / int_mm_limit()).clamp_min_(TINY)
    return (numbers / scales).round_().to(torch.int8), scales


def int_mm_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Rows `x` [N, K] times the transpose of int8 `values` [M, K] with `scales` [M], by `torch._int_mm`: [N, M]."""
    rows, row_scales = quantize_rows(x)
    # With the matrix as the first factor, a product of few rows takes half the time.
    return (torch._int_mm(values, rows.t()).t().contiguous() * row_scales).mul_(scales).to(x.dtype)


@cache
def int_mm_limit() -> int:
    """The largest magnitude in rows that `torch._int_mm` multiplies with an int8 matrix without overflow: 127 or 63.

    Without VNNI, oneDNN adds two products of a number from 0 to 255 and a signed one in sixteen bits.
    """
    largest = torch.full(_PROBE, INT8_LARGEST, dtype=torch.int8)
    is_exact = int(torch._int_mm(largest, largest[:1].t())[0, 0]) == INT8_LARGEST**2 * _PROBE[1]
    return INT8_LARGEST if is_exact else INT8_LARGEST // 2


def needs_reduced_rows() -> bool | None:
    """Whether FBGEMM needs rows of seven bits. Returns None if PyTorch has no FBGEMM.

    Without VNNI it adds two products in sixteen bits, which may overflow with eight bits and cannot with seven.
    """
    if torch.backends.quantized.engine not in ("fbgemm", "x86"):
        return None
    try:
        packed = pack_int8(torch.full(_PROBE, INT8_LARGEST, dtype=torch.int8), torch.ones(_PROBE[0]))
        sums = int8_product(torch.ones((1, _PROBE[1])), [packed], reduced=False)
    except (RuntimeError, AttributeError):
        return None
    return float(sums[0, 0]) < 0.9 * INT8_LARGEST * _PROBE[1]  # an overflow loses far more than rounding


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Suppress `UserWarning`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


_LARGEST = 126  # largest magnitude in units of a row: below 127, as steps and offsets are rounded
# Added to all numbers: the low byte of the sum without its fraction is the number rounded to the nearest whole one.
_MIDDLE = 256.5
_TOLERANCE = 0.1  # largest relative error of a product whose rows are rounded to seven bits
# PyTorch's function for tables of embeddings, whose rows our groups are; it returns float32.
_UNPACK = torch.ops.quantized.embedding_bag_4bit_unpack.default


def pack_int4(values: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Pack codes `values` [m, K] into groups [m, K / 32 x `GROUP_BYTES`]. Returns these and each row's unit [m].

    The number of a code is (code - 8) x scale + zero, with `scales` and `zeros` [m, K / 32]. Packed codes are counted
    from the group's least code, so that the group's offset is one of its numbers.
    """
    codes = values.view(len(values), -1, GROUP)
    low_codes, high_codes = codes.aminmax(dim=-1)
    least, largest = (zeros + (code.float() - INT4_MIDDLE) * scales for code in (low_codes, high_codes))
    units = (torch.maximum(least.abs(), largest.abs()).amax(dim=-1) / _LARGEST).clamp_min(TINY)
    # The step does not matter if all numbers of a group are equal.
    steps = torch.where(high_codes > low_codes, scales / units[:, None], 0.0)
    offsets = least / units[:, None] + _MIDDLE
    constants = torch.stack((steps, offsets), dim=-1).half().view(torch.uint8)
    codes = codes - low_codes[..., None]
    return torch.cat((codes[..., ::2] | (codes[..., 1::2] << 4), constants), dim=-1).flatten(1), units


def int4_product(x: Tensor, groups: Tensor, units: Tensor, kernel: str) -> Tensor:
    """Rows `x` [N, K] times the transpose of a packed matrix [M, K]: [N, M], of the dtype of `x`.

    The kernel `int_mm` rounds each row to whole numbers by a scale of its own, so no row depends on the others;
    `float32` rounds no row.
    """
    columns = x.shape[1]
    tile_rows = -(-len(groups) // max(1, round(len(groups) * columns / TILE)))  # tiles are of about equal size
    parts = torch.split(groups.view(-1, GROUP_BYTES), tile_rows * (columns // GROUP))
    if kernel == "float32":
        rows = x.float()
        products = [F.linear(rows, _UNPACK(part).sub_(_MIDDLE).view(-1, columns)) for part in parts]
        return torch.cat(products, dim=1).mul_(units).to(x.dtype)
    rows, scales = quantize_rows(x)
    sums = torch.empty((len(groups), len(x)), dtype=torch.int32)
    tile = torch.empty((tile_rows, columns), dtype=torch.int8)
    for part, out in zip(parts, torch.split(sums, tile_rows), strict=True):
        matrix = tile[: len(out)]
        matrix.view(-1, GROUP).copy_(_UNPACK(part))
        torch._int_mm(matrix, rows.t(), out=out)
    return (sums.t().contiguous() * scales).mul_(units).to(x.dtype)


@cache
def int4_kernel() -> Kernel:
    """The kernel for int4 in this process. The first call measures kernels, for about 0.2 seconds.

    It is `float32` if `torch._int_mm` is slow, or if the conversion to int8 does not take the low byte of a number
    beyond 127, which C++ leaves undefined.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, INT4_LARGEST + 1, (SIDE, SIDE), dtype=torch.uint8, generator=generator)
    constants = torch.ones((SIDE, SIDE // GROUP))
    groups, units = pack_int4(codes, constants, constants)
    float32 = Kernel("float32", speed=speeds(lambda x: int4_product(x, groups, units, "float32")))
    x = torch.randn((1, SIDE), generator=generator)
    exact, rounded = (int4_product(x, groups, units, kernel) for kernel in ("float32", "int_mm"))
    if float((rounded - exact).norm()) > _TOLERANCE * float(exact.norm()):
        return float32
    int_mm = Kernel("int_mm", int_mm_limit() < INT8_LARGEST, speeds(lambda x: int4_product(x, groups, units, "int_mm")))
    return float32 if average(float32.speed) > MARGIN * average(int_mm.speed) else int_mm
