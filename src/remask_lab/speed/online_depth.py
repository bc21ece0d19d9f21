"""Depths that audits find while requests are served, beside a depth table and fixed depths.

    python -m remask_lab.speed.online_depth

Runs the bundled model, which knows two kinds of questions. Questions of a plan fail where the prefix is reused in many
layers; look-ups bear every depth. Half of the system prompts are asked questions of one kind, half of the other, so no
one depth is right for all of them. Prints a JSON line for each setting.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from remask import LLM, EngineConfig, Output
from remask.tasks.tariff import KINDS, TariffSettings, make_workload
from remask_lab.speed.asked import Asked, accuracy_by_kind
from remask_lab.speed.command import command_parser, print_report, run_command

MARKS = (1, 8, 50)
"""Requests of a prefix after which its depth is reported."""


def main() -> None:
    """Print accuracy, work, audits and depths of each setting."""
    parser = command_parser(__doc__)
    parser.add_argument("--requests", type=int, default=50, help="requests of each system prompt (default 50)")
    parser.add_argument("--prompts", type=int, default=3, help="system prompts of each kind (default 3)")
    parser.add_argument("--intervals", type=int, nargs="+", default=[8, 32], help="audit intervals (default 8 and 32)")
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 2, 3, 4, 8], help="fixed depths")
    parser.add_argument("--taus", type=float, nargs="+", default=[0.97], help="of the audits (default 0.97)")
    args = parser.parse_args()
    llm = LLM("bundled", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=8, max_model_len=192))
    work = workload(llm, args.prompts, args.requests)
    print_report(llm, requests=len(work), table=dict(llm.depth_table.entries))
    settings: list[dict[str, Any]] = [{"depth": "table"}, *({"depth": depth} for depth in args.depths)]
    settings += [
        {"depth": "online", "audit_interval": interval, "tau": tau} for tau in args.taus for interval in args.intervals
    ]
    print(json.dumps({"cache": "none", **measure(llm, work, "none", {})}), flush=True)
    for each in settings:
        print(json.dumps({**each, **measure(llm, work, "bicache", each)}), flush=True)


def workload(llm: LLM, prompts: int, requests: int) -> list[Asked]:
    """`requests` questions for each of `prompts` system prompts of either kind, in the shuffled order of the task."""
    made: list[list[Asked]] = []
    for seed, kind in enumerate(KINDS):
        drawn = make_workload(requests * prompts, prompts, 31337 + seed, TariffSettings(kinds=(kind,)))
        asked = llm.requests([item.messages for item in drawn], {"ignore_eos": True})
        counts = dict[int, int]()
        of_kind = []
        for item, request in zip(drawn, asked, strict=True):
            number = counts[item.prompt_index] = counts.get(item.prompt_index, 0) + 1
            of_kind.append(Asked(replace(request, id=f"{kind} {request.id}"), kind, item.reference, number))
        made.append(of_kind)
    return [asked for pair in zip(*made, strict=True) for asked in pair]


def measure(llm: LLM, work: Sequence[Asked], cache: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Accuracy by kind with 95 % intervals, row-layers, the share of audits in them, and depths by kind.

    Audits' share is that of all requests, and of those after the first `MARKS[-1] / 2` of each prefix, in which the
    first audits are over.
    """
    engine, policy = llm.new_engine(), llm.policy(cache, settings)
    halves = [[asked for asked in work if (asked.number <= MARKS[-1] // 2) is early] for early in (True, False)]
    found: dict[str, Output] = {}
    audits: list[float] = []
    for half in halves:
        before = engine.stats.audit_row_layers, engine.stats.row_layers
        asked = [each.request.with_policy(policy) for each in half]
        found |= {output.id: output for output in llm.run(asked, engine=engine, progress=False)}
        spent, whole = engine.stats.audit_row_layers - before[0], engine.stats.row_layers - before[1]
        audits.append(round(spent / max(1, whole), 4))
    told = accuracy_by_kind(work, found)
    for kind in KINDS:
        own = [each for each in work if each.kind == kind]
        told[kind] |= {
            "depth": {
                mark: round(mean(found[each.request.id].usage.prefix_depth for each in own if each.number == mark), 2)
                for mark in MARKS
                if any(each.number == mark for each in own)
            },
            "row_layers": sum(found[each.request.id].usage.row_layers for each in own),
        }
    return {
        **told,
        "row_layers": sum(output.usage.row_layers for output in found.values()),
        "audits": engine.stats.audits,
        "audits_share": {"first_half": audits[0], "second_half": audits[1]},
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
