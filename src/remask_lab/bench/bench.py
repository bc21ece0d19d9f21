"""Compares cache policies on one workload. Their turns are interleaved in one run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.machine.cpu import read_cpu
from remask.observe import observe_cache
from remask.plan.meter import CacheMeter
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.contenders import Contender
from remask_lab.bench.workload import Task, Workload, prefix_clusters, token_agreement
from remask_lab.ops.flops import Executed
from remask_lab.records.interval import clustered
from remask_lab.records.machine import conditions
from remask_lab.records.record import Record, about

LEAST_ACCURACY = 0.1
"""Share of right answers below which a baseline says nothing: what a cache loses cannot be seen beside it."""


@dataclass(slots=True)
class BenchRound:
    """One run of one contender over its tasks."""

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

    @property
    def row_layers(self) -> int:
        """Row-layers computed, prefix-only passes included."""
        return sum(output.usage.row_layers for output in self.outputs) + self.prefix_row_layers


@dataclass(slots=True)
class BenchRow:
    """One contender, its tasks, and its rounds over them.

    Attributes:
        rounds: rounds with full batches.
        alone: rounds with one request at a time.
        meter, executed: cache use and FLOPs of the warm-up turn, where details are wanted.
    """

    contender: Contender
    tasks: tuple[Task, ...]
    rounds: list[BenchRound] = field(default_factory=list)
    alone: list[BenchRound] = field(default_factory=list)
    meter: CacheMeter = field(default_factory=CacheMeter)
    executed: Executed | None = None


def run_bench(
    llm: LLM,
    workload: Workload,
    contenders: Sequence[Contender],
    rounds: int,
    engine: EngineConfig,
    progress: bool,
    *,
    detail: bool = False,
    alone: bool = True,
    answers: bool = True,
) -> Record:
    """Run every contender over the workload `rounds` times, and return the record that `remask bench` writes.

    The contenders take turns. Each turn has its own engine and store, so that the first request of every prefix is a
    miss. The record holds medians against each contender's baseline, which must be among the contenders. Its settings
    are the workload's shape, and its conditions what else the machine did meanwhile.

    Args:
        detail: the warm-up turn runs all requests and meters their K/V and FLOPs, and every round has a further turn
            of one request at a time. That turn runs as many requests as make the passes of full batches.
        alone: whether a detailed bench has these further turns.
        answers: whether to raise `ConfigError` after a baseline's first turn where it answers hardly anything
            (`check_answers`).
    """
    rows = [BenchRow(contender, (contender.workload or workload).tasks) for contender in contenders]
    single = replace(engine, max_num_seqs=1)
    few = -(-len(workload.tasks) // engine.max_num_seqs)
    began = read_cpu()
    singly = detail and alone and engine.max_num_seqs > 1
    warm_up = [row.tasks if detail else row.tasks[:2] for row in rows]
    measured = [row.tasks for row in rows] + ([row.tasks[:few] for row in rows] if singly else [])
    requests = sum(map(len, warm_up)) + rounds * sum(map(len, measured))
    with tqdm(total=requests, desc="bench", unit="req", disable=not progress) as bar:
        for row, tasks in zip(rows, warm_up, strict=True):
            _turn(llm, row, tasks, engine, bar, metered=detail)
        for _ in range(rounds):
            for row in rows:
                row.rounds.append(_turn(llm, row, row.tasks, engine, bar))
                if answers:
                    _check_answers(row)
            for row in rows if singly else ():
                row.alone.append(_turn(llm, row, row.tasks[:few], single, bar))
    by_name = {row.contender.name: row for row in rows}
    settings = _describe(llm, workload, rounds, engine) | ({"alone_requests": few} if detail else {})
    results = [_result(row, by_name[row.contender.baseline], detail) for row in rows]
    data = {"results": results, "conditions": conditions(began)}
    return Record("bench", about(llm, seed=workload.seed, settings=settings), data)


def _check_answers(row: BenchRow) -> None:
    """Raise what `check_answers` raises on a baseline's turn. One in random order is another sampler's, and may."""
    params = row.tasks[0].request.params
    if row.contender.name != row.contender.baseline or params.remasking == "random":
        return
    verdicts = [task.correct(output.text) for task, output in zip(row.tasks, row.rounds[-1].outputs, strict=True)]
    right = [verdict for verdict in verdicts if verdict is not None]
    if right:
        check_answers(row.contender.name, sum(right) / len(right), params)


def check_answers(name: str, accuracy: float, params: SamplingParams) -> None:
    """Raise `ConfigError` where the baseline `name` answers less than `LEAST_ACCURACY` of its questions."""
    if accuracy < LEAST_ACCURACY:
        raise ConfigError(
            f"{name!r}, without any cache, answers {100 * accuracy:.1f} % of the questions, less than "
            f"{100 * LEAST_ACCURACY:g} %, so nothing can be said of caches: the sampling ({params.max_tokens} tokens "
            f"in {_steps(params)} steps, blocks of {params.block_length or params.max_tokens}) does not fit the task, "
            "or the task the model; leave the sampling out to take the task's own, or measure work and speed alone "
            "on random tokens (--task random, in tables of papers --workload random)"
        )


def _turn(
    llm: LLM, row: BenchRow, tasks: Sequence[Task], config: EngineConfig, bar: "tqdm[Any]", *, metered: bool = False
) -> BenchRound:
    engine = llm.new_engine(replace(config, prefix_match=row.contender.prefix_match))
    if metered:
        observe_cache(engine, row.meter)
        row.executed = Executed(engine)
    work = [task.request.with_policy(row.contender.policy) for task in tasks]
    start = time.perf_counter()
    outputs = {}
    for output in llm.run(work, engine=engine, progress=False):
        outputs[output.id] = output
        bar.set_postfix_str(row.contender.name, refresh=False)
        bar.update()
    seconds = time.perf_counter() - start
    return BenchRound(
        seconds,
        [outputs[task.request.id] for task in tasks],
        engine.store.stats.hits,
        engine.store.stats.partial_hits,
        engine.stats.prefix_row_layers,
        engine.stats.peak_memory_bytes,
    )


def _describe(llm: LLM, workload: Workload, rounds: int, engine: EngineConfig) -> dict[str, Any]:
    params = workload.tasks[0].request.params
    uniform = llm.loaded.config.kind == "uniform"
    return {
        "name": workload.name,
        "requests": len(workload.tasks),
        "prefixes": workload.prefixes,
        "prefix_ratio": round(workload.prefix_ratio, 3),
        "concurrency": engine.max_num_seqs,
        "rounds": rounds,
        "max_tokens": params.max_tokens,
        "steps": _steps(params),
        "block_length": params.block_length or params.max_tokens,
        "canvas_length": params.canvas_length or (llm.engine.max_model_len if uniform else None),
    }


def _steps(params: SamplingParams) -> int:
    """The number of steps of a whole response that the parameters ask for."""
    block = params.block_length or params.max_tokens
    per_block = params.steps_per_block or max(1, block // (params.tokens_per_step or 1))
    return params.steps or per_block * -(-params.max_tokens // block)


def _result(row: BenchRow, baseline: BenchRow, detail: bool) -> dict[str, Any]:
    last, reference = row.rounds[-1], baseline.rounds[-1]
    verdicts = [task.correct(output.text) for task, output in zip(row.tasks, last.outputs, strict=True)]
    judged = [
        (verdict, cluster)
        for verdict, cluster in zip(verdicts, prefix_clusters(row.tasks), strict=True)
        if verdict is not None
    ]
    right, clusters = [verdict for verdict, _ in judged], [cluster for _, cluster in judged]
    agreement = [
        token_agreement(output.token_ids, other.token_ids)
        for output, other in zip(last.outputs, reference.outputs, strict=True)
    ]
    result = {
        "cache": row.contender.name,
        "settings": dict(row.contender.settings),
        "baseline": baseline.contender.name,
        "throughput_tok_s": float(np.median([r.completion_tokens / r.seconds for r in row.rounds])),
        **_compared(row.rounds, baseline.rounds),
        "accuracy": sum(right) / len(right) if right else None,
        "accuracy_interval": list(clustered(right, clusters)) if right else None,
        "parts": part_scores(row.tasks, last.outputs),
        "agreement_with_none": float(np.mean(agreement)),
        "forwards": sum(output.usage.forwards for output in last.outputs),
        "row_layers": last.row_layers,
        "prefix_hits": last.prefix_hits,
        "partial_prefix_hits": last.partial_prefix_hits,
        "cached_tokens": sum(output.usage.cached_tokens for output in last.outputs),
        "prefix_depth": float(np.mean([output.usage.prefix_depth for output in last.outputs])),
        "peak_memory_bytes": last.peak_memory_bytes,
        "extra_memory_bytes": last.peak_memory_bytes - reference.peak_memory_bytes,
    }
    if detail:
        result["alone"] = _compared(row.alone or row.rounds, baseline.alone or baseline.rounds)
        result["cache_ratio"] = row.meter.cache_ratio
        result["staleness"] = row.meter.staleness
        result["staleness_is_upper_bound"] = row.meter.upper_bound
        result |= _flops(row, baseline, result["ratio_to_none"])
    return result


def part_scores(tasks: Sequence[Task], outputs: Sequence[Output]) -> dict[str, float]:
    """For each of the tasks' `parts` its mean over the responses of the tasks that have it."""
    scores: dict[str, list[float]] = {}
    for task, output in zip(tasks, outputs, strict=True):
        for name, score in task.parts.items():
            scores.setdefault(name, []).append(score(output.text or ""))
    return {name: float(np.mean(found)) for name, found in scores.items()}


def _flops(row: BenchRow, baseline: BenchRow, speed: float) -> dict[str, Any]:
    """FLOPs and bytes of all passes. `speed` = `flops_saved` x `efficiency_kept`, the ratio of FLOPs a second."""
    assert row.executed is not None
    assert baseline.executed is not None
    cost, reference = row.executed.meter.total, baseline.executed.meter.total
    saved = reference.total.flops / cost.total.flops
    return {
        "flops": cost.total.flops,
        "flops_by_operation": {name: each.flops for name, each in cost.operations.items()},
        "executed_flops": row.executed.flops,
        "bytes": cost.total.bytes,
        "flops_saved": saved,
        "efficiency_kept": speed / saved,
    }


def _compared(rounds: Sequence[BenchRound], baseline: Sequence[BenchRound]) -> dict[str, Any]:
    """Time and work against the baseline's. `slower_with_less_work` marks a policy that computes less and is slower."""
    ratios = [theirs.seconds / ours.seconds for ours, theirs in zip(rounds, baseline, strict=True)]
    work = baseline[-1].row_layers / rounds[-1].row_layers
    speed = float(np.median(ratios))
    return {
        "ratio_to_none": speed,
        "ratio_range": [min(ratios), max(ratios)],
        "work_ratio_to_none": work,
        "slower_with_less_work": work > 1 and speed < 1,
    }
