"""The time of one block under the caches of uniform models."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from remask import LLM, SamplingParams
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.policies import CachePolicy, UniformCache
from remask_lab.ops.operations import touch_memory


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One block and what stands around it; `prompt` counts all clean positions, completed blocks among them.

    With `next_block` the response goes on after the block, so that there is a next one to refresh.
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
    """Seconds of the steps of a block that were run, and rows that each computed per request."""

    seconds: tuple[float, ...]
    rows: tuple[int, ...]
    steps: int

    @property
    def block_s(self) -> float:
        """Seconds of all steps; those that were not run count as the mean of those that were, the first left out."""
        return _whole(self.seconds, self.steps)

    @property
    def block_rows(self) -> float:
        """Rows of all steps, in the same way."""
        return _whole(self.rows, self.steps)


def time_block(
    llm: LLM, shape: BlockShape, caches: Mapping[str, CachePolicy], full_steps: int, cached_steps: int
) -> dict[str, BlockTime]:
    """Run one block of `shape.batch` requests under every cache, engines of their own taking turns step by step.

    Steps that compute the same rows cost the same. So of `none` and `block-prefix`, whose steps compute nearly the
    whole canvas, only the first `full_steps` are run, and of `uniform-cache` the first and `cached_steps` more.
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
            start = time.perf_counter()
            engine.step()
            seconds[name].append(time.perf_counter() - start)
            computed = engine.stats.row_layers - before
            rows[name].append(computed // (llm.loaded.config.layers * shape.batch))
    return {name: BlockTime(tuple(seconds[name]), tuple(rows[name]), shape.steps) for name in caches}


def block_engine(llm: LLM, shape: BlockShape, policy: CachePolicy) -> Engine:
    """An engine that is about to take the first step of the block for `shape.batch` requests."""
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
