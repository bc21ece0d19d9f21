"""Generation for a benchmark: responses of a model to many requests under one cache policy, and their cost."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.policies import CachePolicy
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.workload import seeded


@dataclass(frozen=True, slots=True)
class Generation:
    """Responses in the order of their requests, and what all of them cost together.

    Attributes:
        prefix_ratio: mean share of the canvas that the shared prefix takes.
        row_layers: rows computed times layers, prefix-only passes included.
    """

    outputs: Sequence[Output]
    prefix_ratio: float
    seconds: float
    row_layers: int
    prefix_hits: int

    @property
    def completion_tokens(self) -> int:
        """Response tokens, each response up to its end token."""
        return sum(output.usage.completion_tokens for output in self.outputs)

    def costs(self) -> dict[str, Any]:
        """The costs as a row of results holds them."""
        return {
            "seconds": self.seconds,
            "completion_tokens": self.completion_tokens,
            "throughput_tok_s": self.completion_tokens / self.seconds,
            "forwards": sum(output.usage.forwards for output in self.outputs),
            "row_layers": self.row_layers,
            "prefix_ratio": self.prefix_ratio,
            "prefix_hits": self.prefix_hits,
        }


def generate(
    llm: LLM, requests: Sequence[Request], policy: CachePolicy, seed: int, progress: bool = False
) -> Generation:
    """Run all `requests` under `policy`, on an engine and a store of their own, so that every prefix is computed once.

    Request i gets the id i, and the seed `seed` + i where its parameters have none. Raises `ConfigError`, before
    anything runs, on a request that cannot run, and where one fails.
    """
    work = []
    for number, request in enumerate(requests):
        work.append(replace(seeded(request, seed + number), id=str(number), policy=policy))
        llm.engine.check(work[-1])
    # The first pass of a process is slower. That time belongs to no policy.
    for _ in llm.run(work[:1], progress=False):
        pass
    engine = llm.new_engine()
    start = time.perf_counter()
    outputs = {output.id: output for output in llm.run(work, engine=engine, progress=progress)}
    seconds = time.perf_counter() - start
    for output in outputs.values():
        if output.error is not None:
            raise ConfigError(f"question {output.id} failed: {output.error}")
    ratios = [item.prefix_length / (len(item.prompt_token_ids) + item.params.max_tokens) for item in work]
    ordered = [outputs[item.id] for item in work]
    return Generation(
        outputs=ordered,
        prefix_ratio=float(np.mean(ratios)),
        seconds=seconds,
        row_layers=sum(output.usage.row_layers for output in ordered) + engine.stats.prefix_row_layers,
        prefix_hits=engine.store.stats.hits,
    )


def sampling_of(llm: LLM, sampling: Mapping[str, Any], max_tokens: int, stop: Sequence[str] = ()) -> SamplingParams:
    """Returns a task's sampling parameters, which `sampling` overrides and the model's own defaults complete.

    Raises `ConfigError` on invalid ones.
    """
    return llm.params({"max_tokens": max_tokens, "stop": tuple(stop), **sampling})
