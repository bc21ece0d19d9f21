"""The workloads that are timed, and the steady speed of an engine on them.

A whole response of 128 steps at 32 requests would take minutes without a cache. As every block repeats the same cycle
of passes, one cycle of refreshes tells the speed, timed while every request of a batch is running. The prefix-only pass
and the first block are run before and are not timed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remask import LLM, EngineConfig, SamplingParams
from remask.checks import AttentionName
from remask.checks.values import check_choice
from remask.engine.engine import Engine
from remask.plan.cost import PassCost
from remask.plan.pass_cost import ExecutedPlan
from remask_lab.bench.workload import random_workload
from remask_lab.observe import CostMeter, observe_costs
from remask_lab.ops.roofline import Peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A preset with random weights, and requests for it.

    Attributes:
        dtype: of weights, activations and K/V.
        canvas: tokens of a request, its response included.
        prefix: tokens of the prompt that all requests share.
        depth: the depth of `bicache`.
        response: tokens that are denoised, in blocks of `block`.
        batches: numbers of requests that run at a time.
        memory: bytes that a GPU must have free for the largest batch.
    """

    name: str
    preset: str
    dtype: str
    canvas: int
    prefix: int
    depth: int
    response: int
    block: int
    batches: tuple[int, ...]
    memory: int

    @property
    def suffix(self) -> int:
        """Tokens of the prompt that a request does not share."""
        return self.canvas - self.response - self.prefix


# The shared prefix is 0.9 of the prompt, and the depth that of LLaDA-8B-Instruct's shipped table at this ratio.
_PAPER = Shape(
    name="llada-8b", preset="llada-8b", dtype="bfloat16", canvas=1280, prefix=922, depth=18, response=256, block=32,
    batches=(1, 8, 32), memory=60 << 30,
)  # fmt: skip
_TINY = Shape(
    name="tiny", preset="llada-tiny", dtype="float32", canvas=72, prefix=36, depth=1, response=32, block=8,
    batches=(1, 2), memory=0,
)  # fmt: skip
SHAPES = (
    _PAPER,
    replace(_PAPER, name="llada-8b-short", batches=(1, 4), memory=24 << 30),
    replace(_PAPER, name="llada-100m", preset="llada-100m", depth=6, memory=4 << 30),
    _TINY,
)


def find_shape(name: str, device: torch.device) -> Shape:
    """The shape of that name. "auto" is the first one that fits into a GPU's free memory, and "tiny" on a CPU.

    Raises `UnknownNameError` on another name.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    shapes = {"auto": next(shape for shape in SHAPES if shape.memory <= free)}
    shapes |= {shape.name: shape for shape in SHAPES}
    check_choice("shape", name, shapes)
    return shapes[name]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        requests: how many run at a time.
        settings: those of the cache.
        tokens_per_step: tokens that a step transfers in each request.
        engine: settings of the engine that differ from `start_engine`'s.
    """

    cache: str
    requests: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_step: int = 2
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A description, which is unique among the cells of a run."""
        words = [f"b={self.requests}", self.cache]
        words += [f"{key}={value}" for key, value in {**self.settings, **self.engine}.items()]
        return " ".join([*words, f"{self.tokens_per_step} tokens a step"])


@dataclass(slots=True)
class RoofMeter(CostMeter):
    """Adds up the seconds of passes at the roofline of a machine with these `peaks`."""

    peaks: Peaks = field(default_factory=lambda: Peaks(1.0, 1.0))
    seconds: float = 0.0

    def note(self, canvases: Sequence[ExecutedPlan]) -> None:
        """Add the cost and the seconds of one pass."""
        CostMeter.note(self, canvases)
        self.seconds += roof_seconds(self.last, self.peaks)


def roof_seconds(cost: PassCost, peaks: Peaks) -> float:
    """Seconds that a pass takes at least by the roofline of a machine with these `peaks`."""
    return max(cost.total.flops / peaks.flops_s, cost.total.bytes / peaks.bytes_s)


def measure_cell(llm: LLM, shape: Shape, cell: Cell, peaks: Peaks, attention: AttentionName) -> dict[str, Any]:
    """Run one cell by `attention`: a warm-up, a timed cycle, and a cycle whose cost is counted.

    Raises `ConfigError` on settings that the engine or the cache refuses, and PyTorch's errors where memory is short.
    """
    steps = shape.block // cell.tokens_per_step
    engine = start_engine(llm, shape, cell, attention)
    run_steps(engine, steps)
    synchronize(llm.model.device)
    start = time.perf_counter()
    host_start = engine.stats.step_cpu_seconds
    run_steps(engine, steps)
    synchronize(llm.model.device)
    seconds = time.perf_counter() - start
    host_seconds = engine.stats.step_cpu_seconds - host_start
    meter = RoofMeter(llm.model.config.widths(llm.model.dtype.itemsize), peaks=peaks)
    observe_costs(engine, meter)
    run_steps(engine, steps)
    return {
        "cell": cell.name,
        "cache": cell.cache,
        "attention": attention,
        "settings": {**cell.settings, **cell.engine},
        "requests": cell.requests,
        "tokens_per_step": cell.tokens_per_step,
        "steps": steps,
        "tok_s": cell.requests * cell.tokens_per_step * steps / seconds,
        "ms_per_step": 1e3 * seconds / steps,
        "host_ms_per_step": 1e3 * host_seconds / steps,
        "roof_ms_per_step": 1e3 * meter.seconds / steps,
        "share_of_roof": meter.seconds / seconds,
    }


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has done all work that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_engine(llm: LLM, shape: Shape, cell: Cell, attention: AttentionName) -> Engine:
    """An engine with the cell's requests under its cache, each of which has transferred tokens at least once."""
    # Neither setting depends on what earlier runs have measured on this machine.
    settings = {"overlap": False, "graphs": False, **cell.engine}
    limits = EngineConfig(max_num_seqs=cell.requests, max_model_len=shape.canvas, attention=attention, **settings)
    engine = llm.session.new_engine(limits)
    steps = shape.response // cell.tokens_per_step
    sampling = SamplingParams(max_tokens=shape.response, steps=steps, block_length=shape.block, ignore_eos=True)
    policy = llm.session.policy(cell.cache, cell.settings)
    workload = random_workload(
        llm, requests=cell.requests, sampling=sampling, prefix_tokens=shape.prefix, prompt_tokens=shape.suffix
    )
    for task in workload.tasks:
        engine.add(task.request.with_policy(policy))
    waiting = {task.request.id for task in workload.tasks}
    while waiting:
        waiting -= {event.id for event in engine.step() if event.transfer is not None}
    return engine


def run_steps(engine: Engine, steps: int) -> None:
    """Run `steps` steps of the engine."""
    for _ in range(steps):
        engine.step()
