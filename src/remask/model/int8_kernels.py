"""Products of rows with matrices of whole numbers of eight bits on a CPU: two kernels, and which of them is taken here.

`torch._int_mm` is fast where oneDNN has a kernel for the processor, and elsewhere many times slower than float32.
FBGEMM, which is in PyTorch's builds for x86, is fast on all of these. A short measurement chooses.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from remask.model.kernel_speed import MARGIN, SIDE, Kernel, average, speeds

TINY = 1e-12
"""Least scale: rows of zeros have one all the same."""


@cache
def int8_kernel() -> Kernel:
    """The kernel of this process. The first call measures, which takes about two tenths of a second."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (SIDE, SIDE), dtype=torch.int8, generator=generator)
    scales = torch.ones(SIDE)
    plain = Kernel("int_mm", int_mm_limit() < 127, speeds(lambda x: whole_product(x, values, scales)))
    reduced = reduced_rows()
    if reduced is None:
        return plain
    packed = pack(values, scales)
    quick = Kernel("fbgemm", reduced, speeds(lambda x: product(x, [packed], reduced)))
    return plain if average(plain.speed) > MARGIN * average(quick.speed) else quick


def pack(values: Tensor, scales: Tensor) -> Any:
    """A matrix [M, K] of int8 with a scale for each row, in the order of FBGEMM's kernel."""
    with _quietly():
        # The type of quantised tensors is on its way out of PyTorch, and nothing else hands over a scale a row.
        zeros = torch.zeros(len(values), dtype=torch.int64)
        made = torch._make_per_channel_quantized_tensor(values.contiguous(), scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(made, None)


def unpack(packed: Any) -> tuple[Tensor, Tensor]:
    """A copy of what `pack` was given."""
    with _quietly():
        values, _ = torch.ops.quantized.linear_unpack(packed)
        return values.int_repr(), values.q_per_channel_scales().float()


def product(x: Tensor, pieces: list[Any], reduced: bool) -> Tensor:
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


def whole_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
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
        largest = pack(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16))
        sums = product(torch.ones((1, 64)), [largest], False)
    except (RuntimeError, AttributeError):
        return None
    return float(sums[0, 0]) < 0.9 * 127 * 64


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
