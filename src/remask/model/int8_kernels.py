"""Products of rows with matrices of whole numbers of eight bits on a CPU: two kernels, and which of them is taken here.

`torch._int_mm` is fast where oneDNN has a kernel for the processor, and elsewhere many times slower than float32.
FBGEMM, which is in PyTorch's builds for x86, is fast on all of these. A short measurement chooses, as no name of a
processor tells.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-12
"""Least scale: rows of zeros have one all the same."""
ROWS = (1, 32, 128)
_SIDE = 1024  # rows and columns of the matrix that is measured
_REPEATS = 3
# How much faster `_int_mm` must be to be taken. Answers differ in their last bits, so noise must not choose.
_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel for int8 on this machine.

    Attributes:
        name: which one.
        reduced: rows are quantised to seven bits, as the processor's instructions overflow on eight.
        speed: how many times as fast as float32 it was with each number of `ROWS`.
    """

    name: Literal["fbgemm", "int_mm"]
    reduced: bool = False
    speed: tuple[float, ...] = ()

    def __str__(self) -> str:
        """For the log."""
        bits = " on rows of seven bits" if self.reduced else ""
        speed = ", ".join(f"{own:.1f}" for own in self.speed)
        return f"{self.name}{bits}, {speed} times as fast as float32 at {', '.join(map(str, ROWS))} rows"


@cache
def int8_kernel() -> Kernel:
    """The kernel of this process. The first call measures, which takes about a tenth of a second."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (_SIDE, _SIDE), dtype=torch.int8, generator=generator)
    scales, numbers = torch.ones(_SIDE), values.float()
    rows = [torch.randn((count, _SIDE), generator=generator) for count in ROWS]
    with torch.inference_mode():
        usual = [_seconds(lambda x=x: F.linear(x, numbers)) for x in rows]  # type: ignore[misc]
        speeds: dict[str, tuple[float, ...]] = {}
        plain = [_seconds(lambda x=x: whole_product(x, values, scales)) for x in rows]  # type: ignore[misc]
        speeds["int_mm"] = tuple(a / b for a, b in zip(usual, plain, strict=True))
        reduced = reduced_rows()
        if reduced is None:
            return Kernel("int_mm", speed=speeds["int_mm"])
        packed = pack(values, scales)
        quick = [_seconds(lambda x=x: product(x, [packed], reduced)) for x in rows]  # type: ignore[misc]
        speeds["fbgemm"] = tuple(a / b for a, b in zip(usual, quick, strict=True))
    ratios = [a / b for a, b in zip(quick, plain, strict=True)]
    if sum(ratios) / len(ratios) > _MARGIN:
        return Kernel("int_mm", speed=speeds["int_mm"])
    return Kernel("fbgemm", reduced, speeds["fbgemm"])


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


def whole_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Rows `x` [N, K] times the transpose of `values` [M, K] of int8 with a scale for each row, by `torch._int_mm`."""
    numbers = x.float()
    by = (numbers.abs().amax(dim=-1, keepdim=True) / 127).clamp_min_(TINY)
    return (torch._int_mm((numbers / by).round().to(torch.int8), values.t()) * by).mul_(scales).to(x.dtype)


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


def _seconds(act: Callable[[], Tensor]) -> float:
    """The shortest time of a call; the first one, which may make a kernel, does not count."""
    act()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return min(times)


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
