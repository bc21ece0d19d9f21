"""`remask analyze steps`: certainty, token changes, drift and cost of every pass, by policy."""

import argparse
from dataclasses import asdict
from typing import Any

from remask.cli.options import object_option
from remask.core.checks import whole
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask_lab.arguments.common import COMPARED_CACHES
from remask_lab.arguments.requests import add_request_options, open_requests, save
from remask_lab.subjects.plots.steps import plot_steps
from remask_lab.subjects.steps import measure_steps
from remask_lab.subjects.steps_report import StepsReport, reading


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    steps = subjects.add_parser(
        "steps", help="entropy, largest probability, token changes, drift, row-layers and milliseconds by pass"
    )
    steps.add_argument("--caches", metavar="SPEC,...", help="policies beside none (default: what suits the model)")
    steps.add_argument("--cache-config", metavar="JSON", help="settings, as one object per policy")
    steps.add_argument("--rounds", type=int, default=3, metavar="K", help="timed turns of each policy (default 3)")
    add_request_options(steps)
    steps.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print table and reading, and save what was asked for."""
    whole("--rounds", args.rounds, low=1)
    llm, work = open_requests(args)
    policies = named_policies(llm, args)
    report = measure_steps(llm, work, policies, args.rounds, progress=llm.progress)
    told = reading(report)
    print(text(report), told, sep="\n\n")
    data = asdict(report) | {"reading": told}
    save(args, llm, work, data, lambda: plot_steps(report, args.plots), rounds=args.rounds)
    return 0


def named_policies(llm: LLM, args: argparse.Namespace) -> list[tuple[str, CachePolicy]]:
    """`--caches` with the settings of `--cache-config`; by default what is usually compared on the model's kind."""
    settings = object_option("--cache-config", args.cache_config)
    usual = COMPARED_CACHES[llm.loaded.config.kind]
    names = usual if args.caches is None else tuple(dict.fromkeys(name.strip() for name in args.caches.split(",")))
    for name in settings:
        if name not in names:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {','.join(names)}")
    return [(name, llm.policy(name, settings.get(name))) for name in names]


def text(report: StepsReport) -> str:
    """A line a policy, for people."""
    width = max(len(curves.cache) for curves in report.policies) + 2
    lines = [
        f"{report.model}: {report.requests} requests",
        "",
        f"{'':<{width}}{'passes':>7}{'entropy first':>14}{'last':>7}{'changes %':>11}{'row-layers':>12}"
        f"{'ms a pass':>11}",
    ]
    for curves in report.policies:
        passes = len(curves.row_layers)
        lines.append(
            f"{curves.cache:<{width}}{sum(curves.passes):>7}{curves.entropy[0]:>14.2f}{curves.entropy[-1]:>7.2f}"
            f"{100 * sum(curves.change_rate) / passes:>11.2f}{sum(curves.row_layers):>12.0f}"
            f"{sum(curves.milliseconds) / passes:>11.2f}"
        )
    return "\n".join(lines)
