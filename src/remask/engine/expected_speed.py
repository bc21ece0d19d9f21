"""How fast a model writes at most on a machine, computed from its shape: nothing is run.

One request at one token a step. A pass takes at least the FLOPs and the bytes of its operations by a GPU's data sheet,
or the CPU time that was measured for LLaDA-8B's shape. Real passes take longer. Nothing here imports PyTorch.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from remask.families import preset
from remask.model.config import ModelConfig
from remask.plan import Plan, Span
from remask.plan.cost import PassCost
from remask.plan.pass_cost import ExecutedPlan, pass_cost

CANVAS, BLOCK = 1024, 32  # tokens of a request, and of a block where the model has no length of its own
DATA_SHEETS: Mapping[str, tuple[float, float]] = {"h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12)}
"""FLOPs of dense bfloat16 and bytes a second, by a part of the GPU's name."""
MEASURED = "llada-8b", 1.77  # seconds of one core for a pass of one block as int8: docs/laptop.md
MEMORY_S = 40e9  # of a CPU; bytes a second


def tokens_per_second(config: ModelConfig, policy: str, device: str | int) -> float:
    """Tokens a second under a cache `policy` on a GPU of `DATA_SHEETS`, or on a CPU with so many cores, as int8."""
    canvas, block = _canvas(config), config.block_length or BLOCK
    return block / sum(pass_seconds(config, rows, device) for rows in rows_computed(policy, canvas, block))


def rows_computed(policy: str, canvas: int, block: int) -> Iterator[int]:
    """Rows that each step of a block computes, at one token a step."""
    for step in range(block):
        if policy == "none":
            yield canvas
        elif step == 0:
            yield 2 * block if policy == "exact" else canvas
        else:  # by default every fourth step of `uniform-cache` computes the next block too
            yield 2 * block if policy == "uniform-cache" and (step + 1) % 4 == 0 else block


@cache
def pass_seconds(config: ModelConfig, rows: int | None, device: str | int) -> float:
    """The least time of a pass over the last `rows` rows of a canvas, or all, on a `device` as above."""
    rows = _canvas(config) if rows is None else rows
    if isinstance(device, int):
        name, seconds = MEASURED
        rate = device * _cost(preset(name), BLOCK, 1).total.flops / seconds
        total = _cost(config, rows, 1).total
        return max(total.flops / rate, total.weights / MEMORY_S)
    flops, moved = DATA_SHEETS[device]
    return sum(max(cost.flops / flops, cost.bytes / moved) for cost in _cost(config, rows, 2).operations.values())


def _canvas(config: ModelConfig) -> int:
    return config.max_length if config.kind == "uniform" else CANVAS


def _cost(config: ModelConfig, rows: int, item: int) -> PassCost:
    """The cost of a pass over the last `rows` rows, of which those of one block predict; `item` bytes a number."""
    canvas = _canvas(config)
    places = np.arange(canvas)
    predicted = places >= canvas - min(rows, config.block_length or BLOCK)
    plan = Plan([Span(range(config.layers), places >= canvas - rows)], predicted)
    return pass_cost(config.widths(item), [ExecutedPlan(plan)])
