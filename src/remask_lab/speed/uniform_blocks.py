"""Times one block of a response under the caches of uniform models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from remask import LLM, SamplingParams
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.policies import CachePolicy, UniformCache
from remask_lab.ops.clock import time_call
from remask_lab.ops.operations import touch_memory


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The lengths of one block, in positions, and of the canvas around it.

    Attributes:
        prompt: all clean positions, completed blocks included.
        block: positions of the block.
        steps: steps of the block.
        per_step: tokens settled in a step.
        batch: requests that run together.
        next_block: whether another block follows, which policies may refresh.
    """

    canvas: int
    prompt: int
    block: int
    steps: int
    per_step: int = 1
    batch: int = 1
    next_block: bool = True


@dataclass(frozen=True, slots=True)
class BlockTime:
    """The steps of a block that ran: their seconds, and rows computed for each request. `steps` counts all steps."""

    seconds: tuple[float, ...]
    rows: tuple[int, ...]
    steps: int

    @property
    def block_s(self) -> float:
        """Seconds of all steps. A step that did not run counts as the mean of those that did, the first left out."""
        return _whole(self.seconds, self.steps)

    @property
    def block_rows(self) -> float:
        """Rows of all steps, in the same way."""
        return _whole(self.rows, self.steps)


def time_block(
    llm: LLM, shape: BlockShape, caches: Mapping[str, CachePolicy], full_steps: int, cached_steps: int
) -> dict[str, BlockTime]:
    """Time one block of `shape.batch` requests under every cache, on engines that take turns step by step.

    Steps that compute the same rows take the same time. So only the first `full_steps` run under `none` and
    `block-prefix`, whose steps compute nearly the whole canvas, and under `uniform-cache` the first and `cached_steps`
    more.
    """
    run = {
        name: min(shape.steps, 1 + cached_steps if isinstance(policy, UniformCache) else full_steps)
        for name, policy in caches.items()
    }
    engines = {name: block_engine(llm, shape, policy) for name, policy in caches.items()}
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    rows: dict[str, list[int]] = {name: [] for name in caches}
    for step in range(shape.steps):
        for name, engine in engines.items():
            if step >= run[name]:
                continue
            before = engine.stats.row_layers
            seconds[name].append(time_call(engine.step, llm.model.device))
            computed = engine.stats.row_layers - before
            rows[name].append(computed // (llm.loaded.config.layers * shape.batch))
    return {name: BlockTime(tuple(seconds[name]), tuple(rows[name]), shape.steps) for name in caches}


def block_engine(llm: LLM, shape: BlockShape, policy: CachePolicy) -> Engine:
    """Returns an engine whose next step is the first of the block, for `shape.batch` requests."""
    engine = llm.new_engine(replace(llm.engine_config, max_num_seqs=shape.batch))
    touch_memory(engine, [policy])
    rng = np.random.default_rng(0)
    for number in range(shape.batch):
        prompt = rng.integers(0, llm.loaded.config.vocab, shape.prompt).tolist()
        params = SamplingParams(
            max_tokens=(2 if shape.next_block else 1) * shape.block,
            block_length=shape.block,
            steps_per_block=shape.steps,
            tokens_per_step=shape.per_step,
            canvas_length=shape.canvas,
            seed=number,
            ignore_eos=True,
        )
        engine.add(Request(str(number), prompt, params, policy=policy))
    return engine


def _whole(values: tuple[Any, ...], steps: int) -> float:
    later = np.mean(values[1:]) if len(values) > 1 else values[0]
    return float(sum(values) + (steps - len(values)) * later)
