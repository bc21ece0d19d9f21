"""How fast products of rows with a matrix are on this machine's CPU, beside those of float32: short measurements.

They choose kernels, and number formats where nobody names one, as no name of a processor tells.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = (1, 32, 128)
SIDE = 1024  # rows and columns of the matrix that is measured
# How much faster a kernel must be to be taken in the place of another. Answers differ in their last bits, so noise must
# not choose.
MARGIN = 1.5
_REPEATS = 5
_OTHERS = 2**23  # numbers of float32 that drive a matrix out of caches

Speeds: TypeAlias = tuple[float, ...]
"""How many times as fast as float32 something is with each number of `ROWS`."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel for products of some kind on this machine.

    Attributes:
        name: which one.
        reduced: rows are quantised to seven bits, as the processor's instructions overflow on eight.
        speed: how many times as fast as float32 it was.
    """

    name: Literal["fbgemm", "int_mm", "float32"]
    reduced: bool = False
    speed: Speeds = ()

    def __str__(self) -> str:
        """For the log."""
        bits = " on rows of seven bits" if self.reduced else ""
        speed = ", ".join(f"{own:.1f}" for own in self.speed)
        return f"{self.name}{bits}, {speed} times as fast as float32 at {', '.join(map(str, ROWS))} rows"


def speeds(act: Callable[[Tensor], Tensor]) -> Speeds:
    """How fast `act`, a product of rows [N, `SIDE`] with a matrix of as many rows, is beside float32."""
    return tuple(usual / own for usual, own in zip(_float32(), _seconds(act), strict=True))


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
    generator, found = torch.Generator().manual_seed(0), []
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
            found.append(min(times))
    return tuple(found)
