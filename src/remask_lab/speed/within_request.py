"""BiCache at depth 0: what refreshing a prefix within the request keeps and spares, beside no cache and fewer steps.

    python -m remask_lab.speed.within_request

Nothing is read from the store: all layers keep the K/V that the prefix's rows had at the last refresh (BiCache,
equation 5 with no shallow layer). Each request has a prefix of its own, so answers are independent of each other. Runs
the bundled models on their tasks, with long and with short prefixes, and the small model of `tests/goldens/tariff`,
whose prefix rows must see the question. Prints a JSON line for each task and setting.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.request import Request
from remask.tasks.tariff import TariffSettings
from remask.tasks.transit import TransitSettings
from remask_lab.bench.workload import Workload, tariff_workload, transit_workload
from remask_lab.records.interval import wilson
from remask_lab.speed import depth_rule
from remask_lab.speed.command import command_parser, print_report, run_command

INTERVALS = (2, 4, 8, 16)
LIMITS = EngineConfig(max_num_seqs=8, max_model_len=512)

Judge = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one task, and what judges the output of each."""

    name: str
    llm: LLM
    requests: Sequence[Request]
    judges: Sequence[Judge]


def main() -> None:
    """Print accuracy and row-layers of each task under `none`, in half of the steps, under `reuse`, and by interval."""
    parser = command_parser(__doc__)
    parser.add_argument("--requests", type=int, default=40, help="of each task and seed (default 40)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the bundled models' tasks")
    args = parser.parse_args()
    bundled, transit = (
        LLM(name, dtype="float32", device="cpu", engine=LIMITS) for name in ("bundled-tariff", "bundled-transit")
    )
    print_report(bundled, requests=args.requests, seeds=args.seeds)
    plans = {"plans, 40 orders": ("plan", 40), "plans, 10 orders": ("plan", 10), "look-ups": ("lookup", 40)}
    for name, (kind, orders) in plans.items():
        settings = TariffSettings(kinds=(kind,), orders=orders)
        draw = partial(tariff_workload, bundled, settings=settings)
        report(_drawn(f"bundled-tariff, {name}", bundled, draw, args.requests, args.seeds))
    for rows in (TransitSettings().rows, 8):
        draw = partial(transit_workload, transit, settings=TransitSettings(rows))
        report(_drawn(f"bundled-transit, {rows} rows", transit, draw, args.requests, args.seeds))
    report(_tariff(args.requests * len(args.seeds)))


def _drawn(name: str, llm: LLM, draw: Callable[..., Workload], requests: int, seeds: Sequence[int]) -> Case:
    """`requests` of each of `seeds`, each under a system prompt of its own, with the model's own sampling."""
    asked, judges = [], []
    for seed in seeds:
        for number, task in enumerate(draw(requests, requests, seed, llm.params()).tasks):
            asked.append(replace(task.request, id=f"{seed}:{number}"))
            judges.append(lambda output, task=task: bool(task.correct(output.text)))
    return Case(name, llm, asked, judges)


def _tariff(requests: int) -> Case:
    lines = depth_rule.read_lines(requests)
    asked = [Request(line["id"], line["prompt_token_ids"], depth_rule.PARAMS, line["prefix_length"]) for line in lines]
    judges = [partial(depth_rule.is_right, line) for line in lines]
    return Case("tests/goldens/tariff", depth_rule.open_model(), asked, judges)


def report(case: Case) -> None:
    """Print a line for each setting."""
    first = case.requests[0]
    steps = first.params.steps or first.params.max_tokens
    ratios = [each.prefix_length / (len(each.prompt_token_ids) + each.params.max_tokens) for each in case.requests]
    print(json.dumps({"task": case.name, "steps": steps, "prefix_ratio": round(sum(ratios) / len(ratios), 3)}))
    settings: list[tuple[str, dict[str, Any], int]] = [("none", {}, steps), ("none", {}, steps // 2)]
    settings.append(("reuse", {}, steps))
    settings += [
        ("bicache", {"depth": 0, "within_request": True, "refresh_interval": interval}, steps)
        for interval in INTERVALS
        if interval < steps
    ]
    settings.append(("bicache", {"depth": 0, "within_request": True, "refresh_interval": None}, steps))
    for cache, own, taken in settings:
        print(json.dumps({"cache": cache, **own, "steps": taken, **measure(case, cache, own, taken)}), flush=True)


def measure(case: Case, cache: str, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Right answers with the 95 % interval of their share, and row-layers."""
    policy = case.llm.policy(cache, settings)
    work = [replace(each, params=_in_steps(each.params, steps)).with_policy(policy) for each in case.requests]
    found = {output.id: output for output in case.llm.run(work, engine=case.llm.new_engine(), progress=False)}
    right = sum(judge(found[each.id]) for each, judge in zip(case.requests, case.judges, strict=True))
    return {
        "right": right,
        "of": len(work),
        "interval": [round(bound, 3) for bound in wilson(right, len(work))],
        "row_layers": sum(output.usage.row_layers for output in found.values()),
    }


def _in_steps(params: SamplingParams, steps: int) -> SamplingParams:
    """`params` with so many steps, and with longer blocks where there would be more blocks than steps."""
    length = params.max_tokens
    return replace(params, steps=steps, block_length=max(params.block_length or length, length // steps))


if __name__ == "__main__":
    sys.exit(run_command(main))
