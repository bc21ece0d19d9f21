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
from remask_lab.gpu.steady import Cell, Shape, filled, run_steps, synchronize

KERNELS = 25  # that are told, those that take most time
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def warm_up(device: torch.device) -> None:
    """Start the profiler once, which takes a second and is not to be counted."""
    with profile(activities=_activities(device)):
        torch.ones(8, device=device).sum().item()


def profile_cell(llm: LLM, shape: Shape, cell: Cell, attention: AttentionName) -> dict[str, Any]:
    """One cycle of `cell` under PyTorch's profiler, which makes it slower: times of kernels hold, and not the step's.

    On a CPU, in a rehearsal, PyTorch's operations stand for kernels.
    """
    device, cycle = llm.model.device, shape.block // cell.tokens_per_step
    engine = filled(llm, shape, cell, attention)
    run_steps(engine, cycle)
    synchronize(device)
    with profile(activities=_activities(device)) as found:
        start = time.perf_counter()
        run_steps(engine, cycle)
        synchronize(device)
        seconds = time.perf_counter() - start
    events = found.events() or []
    wanted = DeviceType.CPU if device.type == "cpu" else DeviceType.CUDA
    spans = [(each.time_range.start, each.time_range.end) for each in events if each.device_type == wanted]
    taken, times = Counter[str](), Counter[str]()
    host, calls = Counter[str](), Counter[str]()
    for each in events:
        length = each.time_range.end - each.time_range.start
        if each.device_type == wanted:
            taken[each.name] += length
            times[each.name] += 1
        if each.device_type == DeviceType.CPU:
            host[each.name] += length
            calls[each.name] += 1
    steps = 1e3 * cycle  # from microseconds to milliseconds a step
    return {
        "cell": cell.name,
        "attention": attention,
        "steps": cycle,
        "ms_per_step": 1e3 * seconds / cycle,
        "busy_ms_per_step": _covered(spans) / steps,
        "busy_share": _covered(spans) / 1e6 / seconds,
        "kernels_per_step": sum(times.values()) / cycle,
        "launches_per_step": {name: calls[name] / cycle for name in LAUNCHES if calls[name]},
        "wait_ms_per_step": sum(host[name] for name in WAITS) / steps,
        "host_calls": [
            {"name": name, "ms_per_step": host[name] / steps, "per_step": calls[name] / cycle}
            for name, _ in host.most_common(10)
        ],
        "kernels": [
            {"name": name[:160], "ms_per_step": length / steps, "per_step": times[name] / cycle}
            for name, length in taken.most_common(KERNELS)
        ],
    }


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU if device.type == "cpu" else ProfilerActivity.CUDA]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time in which at least one of `spans` runs: streams overlap, and operations hold others."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
