"""Measurements of audits, each a command."""

import argparse
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remask.depth.measure import divergence_by_depth, first_pass, readable_prefix_length
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.llm import LLM
from remask.outputs import Output
from remask.policies import BiCache, CachePolicy, Dense
from remask.policies.bicache import Earned
from remask.policies.earned import BOUND, Audit, ladder
from remask.policies.earned import Record as DepthRecord
from remask_lab import gsm8k
from remask_lab.bench.workload import Task, choose_task, prefix_clusters, token_agreement, usual_workload
from remask_lab.records.interval import clustered_interval, mean_interval, paired_difference
from remask_lab.records.record import Record as Result
from remask_lab.records.record import about, as_json, read_record

SHARED = BiCache(depth=Earned())


def learned(args: argparse.Namespace) -> Result:
    """Let audits earn a depth, then compare its answers with those of none and of a fixed depth.

    The earned depth begins at 0, and audits continue while the questions are answered. Work is counted in row-layers,
    that of the first audits also as a multiple of a request under none.
    """
    task = choose_task(args.task, json.loads(args.task_settings))
    llm = LLM(args.model, cache="none", engine=EngineConfig(max_num_seqs=args.at_once))
    sampling = json.loads(args.sampling)
    prefixes = -(-args.learn // 2)
    training = usual_workload(llm, args.learn, args.seed, sampling, prefixes=prefixes, task=task).tasks
    tasks = usual_workload(llm, args.questions, args.seed + 1, sampling, prefixes=args.pages, task=task).tasks
    engine = llm.session.new_engine()
    _run_singly(llm, engine, training, SHARED)
    audits, audit_row_layers = engine.stats.audits, engine.stats.audit_row_layers
    depths = {str(ratio): record.common for (_, ratio), record in sorted(engine.auditor.depths.records.items())}
    outputs = {"earned": _run(llm, engine, tasks, SHARED)}
    later_row_layers = engine.stats.audit_row_layers - audit_row_layers
    for name, policy in (("none", Dense()), ("fixed", BiCache(depth=args.depth))):
        outputs[name] = _run(llm, _without_audits(llm), tasks, policy)
    singles = [_run(llm, _without_audits(llm), [task], Dense())[0] for task in training[:4]]
    work = {name: _row_layers(answers) for name, answers in outputs.items()}
    data = {
        "learned": {
            "audits": audits,
            "row_layers": audit_row_layers,
            "requests_of_work": audit_row_layers / (_row_layers(singles) / len(singles)),
            "depths": depths,
        },
        "later": {
            "audits": engine.stats.audits - audits,
            "share_of_row_layers": later_row_layers / (work["earned"] + later_row_layers),
            "depths": dict(Counter(str(output.usage.prefix_depth) for output in outputs["earned"])),
        },
        "saved": {name: 1 - work[name] / work["none"] for name in ("earned", "fixed")},
        "rows": [_row(name, tasks, answers, outputs["none"]) for name, answers in outputs.items()],
        "audits": as_json(engine.auditor.report()),
    }
    return _result("learned", llm, args, data)


def changed(args: argparse.Namespace) -> Result:
    """Let audits earn all layers on arithmetic, then ask about pages of a town.

    The result says after how many questions the depth falls, and how many answers are lost against none from then on.
    """
    llm = LLM(args.model, cache="none")
    sampling = {"max_tokens": 32, "steps": 8, "block_length": 32, "ignore_eos": True}
    shots, shops = choose_task("gsm8k", {"shots": 4}), choose_task("town", {"shops": 8})
    sums = usual_workload(llm, args.before, args.seed, sampling, prefixes=_prompts(args.before), task=shots)
    tasks = usual_workload(llm, args.after, args.seed, {}, prefixes=args.after // 2, task=shops).tasks
    engine = llm.session.new_engine()
    depths_before = [output.usage.prefix_depth for output in _run_singly(llm, engine, sums.tasks, SHARED)]
    earned = _run_singly(llm, engine, tasks, SHARED)
    depths = [output.usage.prefix_depth for output in earned]
    fall = next((number for number, depth in enumerate(depths) if depth < depths_before[-1]), None)
    none = _run(llm, _without_audits(llm), tasks, Dense())
    start = fall or 0
    outputs = {"earned": earned, "none": none}
    rows = [_row(name, tasks[start:], answers[start:], none[start:]) for name, answers in outputs.items()]
    audits = as_json(engine.auditor.report())
    data = {"before": depths_before, "after": depths, "fell_after": fall, "rows": rows, "audits": audits}
    return _result("changed", llm, args, data)


def ordered(args: argparse.Namespace) -> Result:
    """Audit caches within a request on arithmetic, each request at one random step."""
    llm = LLM(args.model, cache="none", engine=EngineConfig(max_num_seqs=1))
    sampling = {"max_tokens": 64, "steps": 32, "block_length": 32, "ignore_eos": True}
    task = choose_task("gsm8k", {"shots": 0})
    workload = usual_workload(llm, args.audits, args.seed, sampling, prefixes=_prompts(args.audits), task=task)
    rows = []
    for name in args.caches.split(","):
        engine = llm.session.new_engine(replace(llm.session.engine_config, audit=1.0))
        _run(llm, engine, workload.tasks, llm.session.policy(name))
        while engine.auditor.queue or engine.auditor.candidates:
            engine.step()
        (findings,) = engine.auditor.findings.values()
        estimate = findings.estimate
        figures = {"audits": estimate.count, "nats": estimate.mean, "low": estimate.low, "high": estimate.high}
        rows.append({"cache": name, "values": list(findings.recent), **figures})
    return _result("ordered", llm, args, {"rows": rows})


def moved(args: argparse.Namespace) -> Result:
    """The divergence of each request's first predictions at each depth, in nats; `simulated` reads it."""
    llm = LLM(args.model, cache="none")
    task = choose_task(args.task, json.loads(args.task_settings))
    sampling = json.loads(args.sampling)
    workload = usual_workload(llm, args.questions, args.seed, sampling, prefixes=args.pages, task=task)
    layers = llm.model.config.layers
    divergences: list[dict[int, float]] = []
    for item in workload.tasks:
        pass_input = first_pass(llm.session, item.request)
        prefix = readable_prefix_length(llm.session, item.request)
        divergences.append(dict(divergence_by_depth(llm.engine.auditor.passes, pass_input, prefix, ladder(layers))))
    return _result("moved", llm, args, {"layers": layers, "requests": divergences})


def simulated(args: argparse.Namespace) -> Mapping[str, Any]:
    """How often audits would earn `--depth` or more after 24, 48 and 96 requests, by the divergences of `moved`.

    In each of `--draws` simulations, 96 requests are drawn from its result with replacement, two for each prefix.
    """
    data = read_record(args.input, "audits moved").data
    requests: Sequence[Mapping[str, float]] = data["requests"]
    rng = random.Random(args.seed)
    if str(args.depth) not in requests[0]:
        raise ConfigError(f"--depth={args.depth}: the result holds {', '.join(requests[0])}")
    depths: dict[int, Counter[int]] = {count: Counter() for count in (24, 48, 96)}
    passes = 0
    for _ in range(args.draws):
        record = DepthRecord(data["layers"], BOUND)
        for number in range(96):
            divergences, prefix = rng.choice(requests), number // 2
            audit_depths = record.audit_depths(prefix)
            if audit_depths:
                passes += len(audit_depths)
                record.add([Audit(prefix, depth, divergences[str(depth)]) for depth in audit_depths])
            if number + 1 in depths:
                depths[number + 1][record.common] += 1
    shares = {
        f"after {count}": {
            "too_deep": sum(n for depth, n in counts.items() if depth >= args.depth) / args.draws,
            "depths": {str(depth): n for depth, n in sorted(counts.items())},
        }
        for count, counts in depths.items()
    }
    return shares | {"passes_at_a_depth": passes / args.draws}


def _prompts(questions: int) -> int:
    """The number of system prompts for `questions` of GSM8K: all of them, but with two questions each at least."""
    return max(1, min(gsm8k.MAX_PROMPTS, questions // 2))


def _result(name: str, llm: LLM, args: argparse.Namespace, data: Mapping[str, Any]) -> Result:
    """The record of a measurement; its options are the settings."""
    settings = {option: value for option, value in vars(args).items() if option not in ("json", "model", "seed")}
    return Result(f"audits {name}", about(llm, seed=args.seed, settings=settings), data)


def _without_audits(llm: LLM) -> Engine:
    return llm.session.new_engine(replace(llm.session.engine_config, audit=0.0))


def _run(llm: LLM, engine: Engine, tasks: Sequence[Task], policy: CachePolicy) -> list[Output]:
    """Outputs in the order of `tasks`. Raises `ConfigError` if a request failed."""
    requests = [task.request.with_policy(policy) for task in tasks]
    outputs = {output.id: output for output in llm.session.run(requests, engine=engine, progress=False)}
    for output in outputs.values():
        if output.error is not None:
            raise ConfigError(f"the request {output.id} failed: {output.error}")
    return [outputs[request.id] for request in requests]


def _run_singly(llm: LLM, engine: Engine, tasks: Sequence[Task], policy: CachePolicy) -> list[Output]:
    """`_run` of one task after another."""
    return [output for task in tasks for output in _run(llm, engine, [task], policy)]


def _row_layers(outputs: Sequence[Output]) -> int:
    return sum(output.usage.row_layers for output in outputs)


def _row(name: str, tasks: Sequence[Task], outputs: Sequence[Output], others: Sequence[Output]) -> dict[str, Any]:
    """The row of the cache `name`, with fields of `remask bench`'s results. `others` are the outputs under none."""
    clusters = prefix_clusters(tasks)
    right, other_right = (
        [bool(task.correct(output.text)) for task, output in zip(tasks, answers, strict=True)]
        for answers in (outputs, others)
    )
    agreements = [
        token_agreement(output.token_ids, other.token_ids) for output, other in zip(outputs, others, strict=True)
    ]
    difference, *interval = paired_difference(right, other_right, clusters)
    return {
        "cache": name,
        "accuracy": sum(right) / len(right),
        "accuracy_interval": list(clustered_interval(right, clusters)),
        "accuracy_over_none": difference,
        "accuracy_over_none_interval": interval,
        "agreement_with_none": sum(agreements) / len(agreements),
        "agreement_interval": list(mean_interval(agreements, clusters)),
        "forwards": sum(output.usage.forwards for output in outputs),
        "row_layers": _row_layers(outputs),
    }
