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
from remask.policies.earned import BOUND, Audit, Record, ladder
from remask_lab import gsm8k
from remask_lab.bench.workload import Task, choose_task, prefix_clusters, token_agreement, usual_workload
from remask_lab.records.interval import clustered, mean_interval, paired
from remask_lab.records.record import Record as Kept
from remask_lab.records.record import about, as_json, read_record

SHARED = BiCache(depth=Earned())


def learned(args: argparse.Namespace) -> Kept:
    """Let audits earn a depth, then compare answers with those of none and of a depth that is fixed.

    The depth begins at 0, and audits go on while the questions are answered. Work is counted in row-layers; that of
    learning also in requests as none answers them.
    """
    task = choose_task(args.task, json.loads(args.task_settings))
    llm = LLM(args.model, cache="none", engine=EngineConfig(max_num_seqs=args.at_once))
    sampling = json.loads(args.sampling)
    begin = usual_workload(llm, args.learn, args.seed, sampling, prefixes=-(-args.learn // 2), task=task)
    asked = usual_workload(llm, args.questions, args.seed + 1, sampling, prefixes=args.pages, task=task)
    engine = llm.session.new_engine()
    for item in begin.tasks:
        _answers(llm, engine, [item], SHARED)
    learning, count = engine.stats.audit_row_layers, engine.stats.audits
    at_first = _depths(engine)
    rows = {"earned": _answers(llm, engine, asked.tasks, SHARED)}
    later = engine.stats.audit_row_layers - learning
    off = replace(llm.session.engine_config, audit=0.0)
    for name, policy in (("none", Dense()), ("fixed", BiCache(depth=args.depth))):
        rows[name] = _answers(llm, llm.session.new_engine(off), asked.tasks, policy)
    alone = [_answers(llm, llm.session.new_engine(off), [item], Dense())[0] for item in begin.tasks[:4]]
    work = {name: sum(each.usage.row_layers for each in outputs) for name, outputs in rows.items()}
    a_request = sum(each.usage.row_layers for each in alone) / len(alone)
    return _kept(
        "learned",
        llm,
        args,
        {
            "learned": {
                "audits": count,
                "row_layers": learning,
                "requests_of_work": learning / a_request,
                "depths": at_first,
            },
            "later": {
                "audits": engine.stats.audits - count,
                "share_of_row_layers": later / (work["earned"] + later),
                "depths": dict(Counter(str(each.usage.prefix_depth) for each in rows["earned"])),
            },
            "saved": {name: 1 - work[name] / work["none"] for name in ("earned", "fixed")},
            "rows": [_row(name, asked.tasks, outputs, rows["none"]) for name, outputs in rows.items()],
            "audits": _found(engine),
        },
    )


def changed(args: argparse.Namespace) -> Kept:
    """Let all layers be earned on arithmetic, then ask about pages of a town.

    It says how soon the depth falls, and what answers from then on lose against none.
    """
    llm = LLM(args.model, cache="none")
    sampling = {"max_tokens": 32, "steps": 8, "block_length": 32, "ignore_eos": True}
    shots, shops = choose_task("gsm8k", {"shots": 4}), choose_task("town", {"shops": 8})
    sums = usual_workload(llm, args.before, args.seed, sampling, prefixes=_prompts(args.before), task=shots)
    town = usual_workload(llm, args.after, args.seed, {}, prefixes=args.after // 2, task=shops)
    engine = llm.session.new_engine()
    before = [_answers(llm, engine, [item], SHARED)[0].usage.prefix_depth for item in sums.tasks]
    outputs = [_answers(llm, engine, [item], SHARED)[0] for item in town.tasks]
    depths = [each.usage.prefix_depth for each in outputs]
    fell = next((number for number, depth in enumerate(depths) if depth < before[-1]), None)
    none = _answers(llm, llm.session.new_engine(replace(llm.session.engine_config, audit=0.0)), town.tasks, Dense())
    start, rows = 0 if fell is None else fell, {"earned": outputs, "none": none}
    results = [_row(name, town.tasks[start:], answers[start:], none[start:]) for name, answers in rows.items()]
    data = {"before": before, "after": depths, "fell_after": fell, "rows": results, "audits": _found(engine)}
    return _kept("changed", llm, args, data)


def ordered(args: argparse.Namespace) -> Kept:
    """Audit caches within a request on arithmetic, each request at one step by chance."""
    llm = LLM(args.model, cache="none", engine=EngineConfig(max_num_seqs=1))
    sampling = {"max_tokens": 64, "steps": 32, "block_length": 32, "ignore_eos": True}
    task = choose_task("gsm8k", {"shots": 0})
    work = usual_workload(llm, args.audits, args.seed, sampling, prefixes=_prompts(args.audits), task=task)
    rows = []
    for name in args.caches.split(","):
        engine = llm.session.new_engine(replace(llm.session.engine_config, audit=1.0))
        _answers(llm, engine, work.tasks, llm.session.policy(name))
        while engine.auditor.queue or engine.auditor.candidates:
            engine.step()
        (findings,) = engine.auditor.findings.values()
        estimate = findings.estimate
        ends = {"audits": estimate.count, "nats": estimate.mean, "low": estimate.low, "high": estimate.high}
        rows.append({"cache": name, "values": list(findings.recent), **ends})
    return _kept("ordered", llm, args, {"rows": rows})


def moved(args: argparse.Namespace) -> Kept:
    """How far first predictions of single requests move at each depth, which `simulated` reads."""
    llm = LLM(args.model, cache="none")
    work = usual_workload(
        llm,
        args.questions,
        args.seed,
        json.loads(args.sampling),
        prefixes=args.pages,
        task=choose_task(args.task, json.loads(args.task_settings)),
    )
    passes, layers, values = llm.engine.auditor.passes, llm.model.config.layers, list[dict[int, float]]()
    for task in work.tasks:
        seen, prefix = first_pass(llm.session, task.request), readable_prefix_length(llm.session, task.request)
        values.append(dict(divergence_by_depth(passes, seen, prefix, ladder(layers))))
    return _kept("moved", llm, args, {"layers": layers, "requests": values})


def simulated(args: argparse.Namespace) -> Mapping[str, Any]:
    """How often a depth that is too deep would be read after 24, 48 and 96 requests, by what `moved` has found.

    Requests are drawn from it again and again, two of each prefix.
    """
    kept = read_record(args.input, "audits moved").data
    requests: Sequence[Mapping[str, float]] = kept["requests"]
    layers, rng = kept["layers"], random.Random(args.seed)
    if str(args.depth) not in requests[0]:
        raise ConfigError(f"--depth={args.depth}: the result holds {', '.join(requests[0])}")
    depths: dict[int, Counter[int]] = {count: Counter() for count in (24, 48, 96)}
    passes = 0
    for _ in range(args.draws):
        record = Record(layers, BOUND)
        for number in range(96):
            own, prefix = rng.choice(requests), number // 2
            wanted = record.audit_depths(prefix)
            if wanted:
                passes += len(wanted)
                record.add([Audit(prefix, depth, own[str(depth)]) for depth in wanted])
            if number + 1 in depths:
                depths[number + 1][record.common] += 1
    counted = {
        f"after {count}": {
            "too_deep": sum(n for depth, n in counts.items() if depth >= args.depth) / args.draws,
            "depths": {str(depth): n for depth, n in sorted(counts.items())},
        }
        for count, counts in depths.items()
    }
    return counted | {"passes_at_a_depth": passes / args.draws}


def _prompts(questions: int) -> int:
    """System prompts of so many questions of GSM8K: as many as there are, with two questions each at least."""
    return max(1, min(gsm8k.MAX_PROMPTS, questions // 2))


def _found(engine: Engine) -> Any:
    return as_json(engine.auditor.report())


def _depths(engine: Engine) -> dict[str, int]:
    return {str(ratio): record.common for (_, ratio), record in sorted(engine.auditor.depths.records.items())}


def _kept(name: str, llm: LLM, args: argparse.Namespace, data: Mapping[str, Any]) -> Kept:
    settings = {option: value for option, value in vars(args).items() if option not in ("json", "model", "seed")}
    return Kept(f"audits {name}", about(llm, seed=args.seed, settings=settings), data)


def _answers(llm: LLM, engine: Engine, tasks: Sequence[Task], policy: CachePolicy) -> list[Output]:
    """Outputs in the order of `tasks`. Raises `ConfigError` where a request failed."""
    requests = [task.request.with_policy(policy) for task in tasks]
    found = {output.id: output for output in llm.session.run(requests, engine=engine, progress=False)}
    for output in found.values():
        if output.error is not None:
            raise ConfigError(f"the request {output.id} failed: {output.error}")
    return [found[request.id] for request in requests]


def _row(name: str, tasks: Sequence[Task], outputs: Sequence[Output], none: Sequence[Output]) -> dict[str, Any]:
    clusters = prefix_clusters(tasks)
    right, other = ([bool(t.correct(o.text)) for t, o in zip(tasks, own, strict=True)] for own in (outputs, none))
    agreement = [token_agreement(a.token_ids, b.token_ids) for a, b in zip(outputs, none, strict=True)]
    over = paired(right, other, clusters)
    return {
        "cache": name,
        "accuracy": sum(right) / len(right),
        "accuracy_interval": list(clustered(right, clusters)),
        "accuracy_over_none": over[0],
        "accuracy_over_none_interval": list(over[1:]),
        "agreement_with_none": sum(agreement) / len(agreement),
        "agreement_interval": list(mean_interval(agreement, clusters)),
        "forwards": sum(output.usage.forwards for output in outputs),
        "row_layers": sum(output.usage.row_layers for output in outputs),
    }
