"""Side-by-side measurement of cache policies on one workload, interleaved in one run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from remask.engine.config import EngineConfig
from remask.evals.interval import wilson
from remask.evals.machine import commit, machine, versions
from remask.evals.workload import Task, Workload, token_agreement
from remask.llm import LLM, Output, Work
from remask.policies import CachePolicy
from remask.store.prefix_index import PrefixMatch


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table: a policy under a name, on the workload or on a variant of it."""

    name: str
    policy: CachePolicy
    workload: Workload | None = None  # None: the bench's own
    prefix_match: PrefixMatch = "exact"


@dataclass(slots=True)
class Round:
    """One pass of one contender over the workload."""

    seconds: float
    outputs: list[Output]
    prefix_hits: int
    partial_prefix_hits: int
    prefix_row_layers: int
    peak_memory_bytes: int

    @property
    def completion_tokens(self) -> int:
        """Response tokens, each response up to its end token."""
        return sum(output.usage.completion_tokens for output in self.outputs)


@dataclass(slots=True)
class Row:
    """A contender's rounds over the tasks that it was given."""

    contender: Contender
    tasks: tuple[Task, ...]
    rounds: list[Round] = field(default_factory=list)


def run_bench(
    llm: LLM, workload: Workload, contenders: Sequence[Contender], rounds: int, engine: EngineConfig, progress: bool
) -> dict[str, Any]:
    """Run every contender over the workload `rounds` times, taking turns, and report medians against `none`.

    Each turn has an engine and a store of its own, so that every first request of a prefix is a miss. The first
    contender must be `none`. Returns the JSON that `remask bench` writes.
    """
    rows = [Row(contender, (contender.workload or workload).tasks) for contender in contenders]
    with tqdm(total=(rounds + 1) * len(rows), desc="bench", unit="turn", disable=not progress) as bar:
        for row in rows:
            _turn(llm, row.contender, row.tasks[:2], engine)
            bar.update()
        for _ in range(rounds):
            for row in rows:
                row.rounds.append(_turn(llm, row.contender, row.tasks, engine))
                bar.update()
    baseline = rows[0]
    return {
        "machine": machine(llm),
        "commit": commit(),
        "versions": versions(),
        "workload": _describe(llm, workload, rounds, engine),
        "results": [_result(row, baseline) for row in rows],
    }


def _turn(llm: LLM, contender: Contender, tasks: Sequence[Task], config: EngineConfig) -> Round:
    engine = llm.new_engine(replace(config, prefix_match=contender.prefix_match))
    work = [Work(task.request, contender.policy) for task in tasks]
    start = time.perf_counter()
    outputs = {output.id: output for output in llm.run(work, engine=engine, progress=False)}
    seconds = time.perf_counter() - start
    return Round(
        seconds,
        [outputs[task.request.id] for task in tasks],
        engine.store.stats.hits,
        engine.store.stats.partial_hits,
        engine.stats.prefix_row_layers,
        engine.stats.peak_memory_bytes,
    )


def _describe(llm: LLM, workload: Workload, rounds: int, engine: EngineConfig) -> dict[str, Any]:
    params = workload.tasks[0].request.params
    return {
        "model": llm.loaded.name,
        "parameters": llm.loaded.config.parameters,
        "layers": llm.loaded.config.layers,
        "name": workload.name,
        "seed": workload.seed,
        "requests": len(workload.tasks),
        "prefixes": workload.prefixes,
        "prefix_ratio": round(workload.prefix_ratio, 3),
        "concurrency": engine.max_num_seqs,
        "rounds": rounds,
        "max_tokens": params.max_tokens,
        "steps": params.steps or params.max_tokens,
        "block_length": params.block_length or params.max_tokens,
    }


def _result(row: Row, baseline: Row) -> dict[str, Any]:
    last = row.rounds[-1]
    ratios = [theirs.seconds / ours.seconds for ours, theirs in zip(row.rounds, baseline.rounds, strict=True)]
    work = sum(output.usage.row_layers for output in last.outputs) + last.prefix_row_layers
    reference = sum(output.usage.row_layers for output in baseline.rounds[-1].outputs)
    verdicts = [task.correct(output.text) for task, output in zip(row.tasks, last.outputs, strict=True)]
    right = [verdict for verdict in verdicts if verdict is not None]
    agreement = [
        token_agreement(output.token_ids, other.token_ids)
        for output, other in zip(last.outputs, baseline.rounds[-1].outputs, strict=True)
    ]
    return {
        "cache": row.contender.name,
        "throughput_tok_s": float(np.median([r.completion_tokens / r.seconds for r in row.rounds])),
        "ratio_to_none": float(np.median(ratios)),
        "ratio_range": [min(ratios), max(ratios)],
        "accuracy": sum(right) / len(right) if right else None,
        "accuracy_interval": list(wilson(sum(right), len(right))) if right else None,
        "agreement_with_none": float(np.mean(agreement)),
        "forwards": sum(output.usage.forwards for output in last.outputs),
        "row_layers": work,
        "work_ratio_to_none": reference / work,
        "prefix_hits": last.prefix_hits,
        "partial_prefix_hits": last.partial_prefix_hits,
        "cached_tokens": sum(output.usage.cached_tokens for output in last.outputs),
        "prefix_depth": float(np.mean([output.usage.prefix_depth for output in last.outputs])),
        "peak_memory_bytes": last.peak_memory_bytes,
    }
