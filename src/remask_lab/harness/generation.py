"""Answers of a model to many conversations under one cache policy, and what they cost."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from remask.core.sampling import SamplingParams
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.policies import CachePolicy


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt as token ids, how many leading ones others share, and how it is answered."""

    tokens: Sequence[int]
    shared: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """Answers in the order of their asks, and what they took together."""

    outputs: Sequence[Output]
    prefix_ratio: float  # mean share of the canvas that the shared prefix takes
    seconds: float
    row_layers: int
    prefix_hits: int

    @property
    def completion_tokens(self) -> int:
        """Response tokens, each response up to its end token."""
        return sum(output.usage.completion_tokens for output in self.outputs)

    def costs(self) -> dict[str, Any]:
        """The numbers that a row of results holds."""
        return {
            "seconds": self.seconds,
            "completion_tokens": self.completion_tokens,
            "throughput_tok_s": self.completion_tokens / self.seconds,
            "forwards": sum(output.usage.forwards for output in self.outputs),
            "row_layers": self.row_layers,
            "prefix_ratio": self.prefix_ratio,
            "prefix_hits": self.prefix_hits,
        }


def generate(llm: LLM, asks: Sequence[Ask], policy: CachePolicy, seed: int, progress: bool = False) -> Generation:
    """Answer all of `asks` on an engine and a store of their own, so that every prefix is computed once.

    Request i has the seed `seed` + i where its parameters say none. Raises `ConfigError`, before anything runs, on one
    that cannot run, and where one fails.
    """
    work = []
    for number, ask in enumerate(asks):
        params = ask.params if ask.params.seed is not None else replace(ask.params, seed=seed + number)
        work.append(Request(str(number), ask.tokens, params, ask.shared, policy))
        llm.engine.check(work[-1])
    # What a first pass takes longer is nobody's throughput.
    for _ in llm.run(work[:1], progress=False):
        pass
    engine = llm.new_engine()
    start = time.perf_counter()
    outputs = {output.id: output for output in llm.run(work, engine=engine, progress=progress)}
    seconds = time.perf_counter() - start
    for output in outputs.values():
        if output.error is not None:
            raise ConfigError(f"question {output.id} failed: {output.error}")
    ratios = [ask.shared / (len(ask.tokens) + ask.params.max_tokens) for ask in asks]
    ordered = [outputs[item.id] for item in work]
    return Generation(
        outputs=ordered,
        prefix_ratio=float(np.mean(ratios)),
        seconds=seconds,
        row_layers=sum(output.usage.row_layers for output in ordered) + engine.stats.prefix_row_layers,
        prefix_hits=engine.store.stats.hits,
    )


def params_for(sampling: Mapping[str, Any], max_tokens: int, stop: Sequence[str] = ()) -> SamplingParams:
    """`sampling` over what a task asks for. Raises `ConfigError` on parameters that cannot be used."""
    return SamplingParams.from_mapping({"max_tokens": max_tokens, "stop": tuple(stop), **sampling})
