"""Where the time of a steady step goes: the device's kernels, how long it is idle, launches, and the host's waits."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from remask import LLM
from remask.checks import AttentionName
from remask_lab.gpu.steady import Cell, Shape, run_steps, start_engine, synchronize

KERNELS, HOST_CALLS = 25, 10  # the numbers that are listed, of those that take the most time
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def warm_up(device: torch.device) -> None:
    """Start the profiler once; its first start takes a second."""
    with profile(activities=_activities(device)):
        torch.ones(8, device=device).sum().item()


def profile_cell(llm: LLM, shape: Shape, cell: Cell, attention: AttentionName) -> dict[str, Any]:
    """Run one cycle of `cell` under PyTorch's profiler, and return its kernels, launches and waits, in milliseconds.

    The profiler slows the host down, so the times of kernels are exact and that of a step is not. On a CPU, in a
    rehearsal, PyTorch's operations stand for kernels.
    """
    device = llm.model.device
    steps = shape.block // cell.tokens_per_step
    engine = start_engine(llm, shape, cell, attention)
    run_steps(engine, steps)
    synchronize(device)
    with profile(activities=_activities(device)) as profiler:
        start = time.perf_counter()
        run_steps(engine, steps)
        synchronize(device)
        seconds = time.perf_counter() - start
    events = profiler.events() or []
    kernel_device = DeviceType.CPU if device.type == "cpu" else DeviceType.CUDA
    spans = [(event.time_range.start, event.time_range.end) for event in events if event.device_type == kernel_device]
    kernel_us, kernel_counts = Counter[str](), Counter[str]()
    host_us, host_counts = Counter[str](), Counter[str]()
    for event in events:
        microseconds = event.time_range.end - event.time_range.start
        if event.device_type == kernel_device:
            kernel_us[event.name] += microseconds
            kernel_counts[event.name] += 1
        if event.device_type == DeviceType.CPU:
            host_us[event.name] += microseconds
            host_counts[event.name] += 1

    def ms_per_step(microseconds: float) -> float:
        return microseconds / (1e3 * steps)

    return {
        "cell": cell.name,
        "attention": attention,
        "steps": steps,
        "ms_per_step": 1e3 * seconds / steps,
        "busy_ms_per_step": ms_per_step(_covered(spans)),
        "busy_share": _covered(spans) / 1e6 / seconds,
        "kernels_per_step": sum(kernel_counts.values()) / steps,
        "launches_per_step": {name: host_counts[name] / steps for name in LAUNCHES if host_counts[name]},
        "wait_ms_per_step": ms_per_step(sum(host_us[name] for name in WAITS)),
        "host_calls": [
            {"name": name, "ms_per_step": ms_per_step(microseconds), "per_step": host_counts[name] / steps}
            for name, microseconds in host_us.most_common(HOST_CALLS)
        ],
        "kernels": [
            {"name": name[:160], "ms_per_step": ms_per_step(microseconds), "per_step": kernel_counts[name] / steps}
            for name, microseconds in kernel_us.most_common(KERNELS)
        ],
    }


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """What the profiler records: CUDA activity, or on a CPU that of the host."""
    return [ProfilerActivity.CPU if device.type == "cpu" else ProfilerActivity.CUDA]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of `spans`, (start, stop) each: streams overlap, and operations contain others."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
