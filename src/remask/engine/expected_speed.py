"""Upper bounds of a model's speed on a machine, computed from its shape without running anything.

They are for one request at one token a step. On a GPU a pass takes the time of its FLOPs and bytes by the data sheet,
on a CPU a time scaled from one that was measured for LLaDA-8B's shape. Real passes take longer. Nothing here imports
PyTorch.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from remask.families import preset
from remask.model.config import ModelConfig
from remask.plan import Plan, Span
from remask.plan.cost import PassCost
from remask.plan.pass_cost import ExecutedPlan, pass_cost

CANVAS_LENGTH = 1024  # default tokens of a canvas
BLOCK_LENGTH = 32  # default tokens of a block
DATA_SHEETS: Mapping[str, tuple[float, float]] = {"h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12)}
"""FLOPs of dense bfloat16 and bytes a second, by a part of the GPU's name."""
CPU_REFERENCE = "llada-8b", 1.77  # a preset, and seconds of one core for a pass of one block as int8: docs/laptop.md
CPU_BANDWIDTH = 40e9  # bytes a second
INT8, BFLOAT16 = 1, 2  # bytes of a number: of weights on a CPU, and of all numbers on a GPU


def tokens_per_second(config: ModelConfig, policy: str, device: str | int) -> float:
    """Tokens a second under the cache `policy`. `device` is a GPU of `DATA_SHEETS`, or a CPU's number of cores.

    On a CPU weights are int8.
    """
    canvas_length, block_length = _canvas_length(config), config.block_length or BLOCK_LENGTH
    row_counts = row_counts_of(policy, canvas_length, block_length)
    return block_length / sum(pass_seconds(config, row_count, device) for row_count in row_counts)


def row_counts_of(policy: str, canvas_length: int, block_length: int) -> Iterator[int]:
    """Yield the number of rows that each step of a block computes, at one token a step."""
    for step in range(block_length):
        if policy == "none":
            yield canvas_length
        elif step == 0:
            yield 2 * block_length if policy == "exact" else canvas_length
        elif policy == "uniform-cache" and (step + 1) % 4 == 0:  # by default every fourth step computes the next block
            yield 2 * block_length
        else:
            yield block_length


@cache
def pass_seconds(config: ModelConfig, row_count: int | None, device: str | int) -> float:
    """Lower bound of the seconds of a pass over the last `row_count` rows of a canvas (None: all of them).

    `device` is as in `tokens_per_second`.
    """
    rows = _canvas_length(config) if row_count is None else row_count
    return _cpu_seconds(config, rows, device) if isinstance(device, int) else _gpu_seconds(config, rows, device)


def _cpu_seconds(config: ModelConfig, rows: int, cores: int) -> float:
    """Seconds at the FLOPs a second of the measured pass on each of `cores`, or of reading the weights if longer."""
    name, seconds = CPU_REFERENCE
    flops_per_second = cores * _cost(preset(name), BLOCK_LENGTH, INT8).total.flops / seconds
    cost = _cost(config, rows, INT8).total
    return max(cost.flops / flops_per_second, cost.weights / CPU_BANDWIDTH)


def _gpu_seconds(config: ModelConfig, rows: int, gpu: str) -> float:
    """Seconds of all operations one after the other, each bound by the FLOPs or the bandwidth of the data sheet."""
    flops_per_second, bandwidth = DATA_SHEETS[gpu]
    costs = _cost(config, rows, BFLOAT16).operations.values()
    return sum(max(cost.flops / flops_per_second, cost.bytes / bandwidth) for cost in costs)


def _canvas_length(config: ModelConfig) -> int:
    return config.max_length if config.kind == "uniform" else CANVAS_LENGTH


def _cost(config: ModelConfig, row_count: int, itemsize: int) -> PassCost:
    """The cost of a pass over the last `row_count` rows, which predicts one block, with `itemsize` bytes a number."""
    canvas_length = _canvas_length(config)
    positions = np.arange(canvas_length)
    predict = positions >= canvas_length - min(row_count, config.block_length or BLOCK_LENGTH)
    plan = Plan([Span(range(config.layers), positions >= canvas_length - row_count)], predict)
    return pass_cost(config.widths(itemsize), [ExecutedPlan(plan)])
