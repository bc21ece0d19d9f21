"""The machine's roofline: the rates of a matrix product and of a copy, both measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from remask_lab.ops.clock import time_call

TRIES = 5
# Rows of the matrices that are multiplied, and bytes that are copied: more than any cache holds.
SIZES = {"cpu": (1536, 1 << 28), "cuda": (8192, 1 << 30)}


@dataclass(frozen=True, slots=True)
class Peaks:
    """The machine's two limits: FLOPs a second of a matrix product, and bytes a second of a copy."""

    flops_s: float
    bytes_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which the product, not the copy, is the limit."""
        return self.flops_s / self.bytes_s

    def roof(self, intensity: float) -> float:
        """FLOPs a second that are attainable at `intensity` FLOPs a byte (the roofline model)."""
        return min(self.flops_s, intensity * self.bytes_s)


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Time a few square matrix products and a few copies larger than any cache, and keep the best. Takes a second.

    A copy of n bytes reads n and writes n. Both are probes, not limits: other shapes may do a little better.
    """
    size, copied = SIZES["cuda" if device.type == "cuda" else "cpu"]
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = _best(lambda: torch.mm(a, b, out=product), device)
    copy = _best(lambda: target.copy_(source), device)
    return Peaks(flops_s=2 * size**3 / multiply, bytes_s=2 * copied / copy)


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of `TRIES` calls, after one that warms up."""
    time_call(call, device)
    return min(time_call(call, device) for _ in range(TRIES))
