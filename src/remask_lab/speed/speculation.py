"""What `speculate` gains: passes that are saved, work that is added, and time, beside the same requests without it.

    python -m remask_lab.speed.speculation [--models bundled-tariff] [--quantization int8] [--batches 1,8,32]
    python -m remask_lab.speed.speculation --roofline h100

Each model answers questions of its own task under one cache, so many at a time, with each number of states a pass. All
settings take turns in one run, and every answer must be that of the run without drafts. Prints a JSON line for each.

With `--roofline` nothing is run. A cached pass over the blocks of so many requests at LLaDA-8B's shape takes the time
of its FLOPs or its bytes by the data sheet, operation by operation, whichever is more. The lines say how many times as
long a pass with drafts takes: they pay where a cached pass makes more steps than that.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from remask import LLM, EngineConfig
from remask.checkpoint.presets import preset
from remask.engine.request import Request
from remask.errors import IntegrityError, UnknownNameError
from remask.plan.pass_cost import ExecutedPlan, pass_cost
from remask.plan.plan import Plan
from remask.plan.spans import Span
from remask.request.result import Result
from remask_lab.arguments.common import check_least, separated
from remask_lab.bench.workload import usual_workload
from remask_lab.speed.command import command_parser, print_report, run_command

STATES = "2,3,4,8,auto"
DATA_SHEETS = {"h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12)}  # FLOPs and bytes a second, dense bfloat16
CANVAS, BLOCK = 1280, 32


def main() -> None:
    """Measure or compute, and print a line for each setting."""
    parser = command_parser(__doc__)
    parser.add_argument("--models", default="bundled-tariff,bundled-transit")
    parser.add_argument("--quantization", help="of the weights, such as int8")
    parser.add_argument("--cache", default="block-dual")
    parser.add_argument("--sampling", default="{}", help="JSON object of sampling parameters beside the task's own")
    parser.add_argument("--states", default=STATES, help=f"values of speculate (default {STATES})")
    parser.add_argument("--batches", default="1,8,32", help="requests at a time")
    parser.add_argument("--requests", type=int, default=16, help="at least, and one batch (default 16)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--roofline", help=f"compute for one of {', '.join(DATA_SHEETS)} in place of a measurement")
    args = parser.parse_args()
    check_least(args, requests=1, rounds=1)
    batches = [int(each) for each in separated(args.batches)]
    states = [each if each == "auto" else int(each) for each in separated(args.states)]
    if args.roofline is not None:
        compute(args.roofline, batches, [each for each in states if isinstance(each, int)])
        return
    for name in separated(args.models):
        llm = LLM(name, dtype="float32", device="cpu", quantization=args.quantization)
        print_report(llm, model=name, quantization=args.quantization, cache=args.cache)
        for batch in batches:
            for line in measure(llm, args, batch, states):
                print(json.dumps({"model": name, "batch": batch, **line}), flush=True)


def measure(llm: LLM, args: argparse.Namespace, batch: int, states: Sequence[int | str]) -> list[dict[str, Any]]:
    """A line for each number of states, beside the run without drafts."""
    tasks = usual_workload(llm, max(args.requests, batch), 1, json.loads(args.sampling)).tasks
    asked = [task.request.with_policy(llm.policy(args.cache)) for task in tasks]
    settings: list[int | str | None] = [None, *states]
    seconds: dict[int | str | None, list[float]] = {each: [] for each in settings}
    results: dict[int | str | None, dict[str, Result]] = {}
    for _ in range(args.rounds):
        for each in settings:
            took, results[each] = _answers(llm, asked, batch, each)
            seconds[each].append(took)
    plain, lines = results[None], []
    for each in states:
        drafted = results[each]
        if any(drafted[name].token_ids != plain[name].token_ids for name in plain):
            raise IntegrityError(f"speculate={each!r} has changed an answer")
        ratios = [one / other for one, other in zip(seconds[None], seconds[each], strict=True)]
        lines.append(
            {
                "speculate": each,
                "steps": _sum(plain, "steps"),
                "accepted": _sum(drafted, "accepted"),
                "passes": _sum(drafted, "forwards") / _sum(plain, "forwards"),
                "row_layers": _sum(drafted, "row_layers") / _sum(plain, "row_layers"),
                "times_as_fast": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
            }
        )
    return lines


def _answers(
    llm: LLM, asked: Sequence[Request], batch: int, states: int | str | None
) -> tuple[float, dict[str, Result]]:
    """The seconds that the requests take in an engine of their own, `batch` at a time, and their results."""
    engine = llm.new_engine(EngineConfig(max_num_seqs=batch, max_model_len=512))
    if states == "auto":  # it measures once in the life of an engine, which is not what is compared
        engine.memory.pace.states(1, 0.5, 1)
    for request in asked:
        engine.add(replace(request, params=replace(request.params, speculate=states)))
    start, results = time.perf_counter(), dict[str, Result]()
    while engine.busy:
        for event in engine.step():
            if event.result is not None:
                results[event.id] = event.result
    return time.perf_counter() - start, results


def _sum(results: dict[str, Result], name: str) -> int:
    return sum(getattr(result.usage, name) for result in results.values())


def compute(gpu: str, batches: Sequence[int], states: Sequence[int]) -> None:
    """Print how many times as long a cached pass takes with so many states, by the data sheet of `gpu`."""
    if gpu not in DATA_SHEETS:
        raise UnknownNameError("GPU", gpu, DATA_SHEETS)
    for batch in batches:
        alone = bound(gpu, batch, 1)
        more = {each: round(bound(gpu, batch, each) / alone, 3) for each in states}
        print(json.dumps({"gpu": gpu, "batch": batch, "ms": round(1e3 * alone, 3), "times_as_long": more}))


def bound(gpu: str, batch: int, states: int) -> float:
    """The least seconds of a cached pass over `states` states of a block of each of `batch` requests."""
    config = preset("llada-8b")
    rows = np.arange(CANVAS) >= CANVAS - BLOCK
    plan = Plan([Span(range(config.layers), rows)], rows)
    flops, moved = DATA_SHEETS[gpu]
    cost = pass_cost(config.widths(2), [ExecutedPlan(plan)] * (batch * states))
    return sum(max(each.flops / flops, each.bytes / moved) for each in cost.operations.values())


if __name__ == "__main__":
    sys.exit(run_command(main))
