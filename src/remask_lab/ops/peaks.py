"""What a machine reaches by itself: a matrix product and a copy, timed."""

import time
from collections.abc import Callable

import torch

from remask_lab.ops.report import Peaks

TRIES = 5
# Rows of the matrices that are multiplied, and bytes that are copied: more than any cache holds.
SIZES = {"cpu": (1536, 1 << 28), "cuda": (8192, 1 << 30)}


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """The best of a few square matrix products, and of a few copies of what fits into no cache; a second or two.

    A copy of n bytes reads n and writes n. Both are probes, not limits: other shapes may do a little better.
    """
    on_gpu = device.type == "cuda"
    size, copied = SIZES["cuda" if on_gpu else "cpu"]
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = _best(lambda: torch.mm(a, b, out=product), on_gpu)
    copy = _best(lambda: target.copy_(source), on_gpu)
    return Peaks(flops_s=2 * size**3 / multiply, bytes_s=2 * copied / copy)


def _best(call: Callable[[], object], on_gpu: bool) -> float:
    """Seconds of the fastest of `TRIES` calls, after one that warms up."""
    times = []
    for _ in range(TRIES + 1):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
