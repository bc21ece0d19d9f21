"""`remask analyze features`: how K, V, attention and FFN outputs change from pass to pass, and what foretells it."""

import argparse
from dataclasses import asdict
from typing import Any

from remask.core.checks import real
from remask_lab.cli.analyze.requests import add_request_options, open_requests, save
from remask_lab.subjects.features import measure_features
from remask_lab.subjects.features_report import FEATURES, WORDS, FeaturesReport, reading
from remask_lab.subjects.plots.features import plot_features


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    features = subjects.add_parser(
        "features", help="similarity of K, V, attention and FFN outputs between passes, and how V foretells the others"
    )
    features.add_argument(
        "--ratio", type=float, default=0.25, metavar="RHO", help="share of the response that is picked (default 0.25)"
    )
    add_request_options(features)
    features.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print table and reading, and save what was asked for."""
    real("--ratio", args.ratio, 0, 1, above=True)
    llm, work = open_requests(args)
    report = measure_features(llm, work, args.ratio, progress=llm.progress)
    told = reading(report)
    print(text(report), told, sep="\n\n")
    data = asdict(report) | {"reading": told}
    save(args, llm, work, data, lambda: plot_features(report, args.plots), ratio=args.ratio)
    return 0


def text(report: FeaturesReport) -> str:
    """Means and correlations, for people."""
    lines = [
        f"{report.model}: {report.layers} layers; {report.requests} requests, {report.passes} passes",
        "",
        f"{'similarity a pass':<24}{'prompt':>12}{'response':>12}",
    ]
    lines += [
        f"{WORDS[name]:<24}{report.means[name].prompt:>12.5f}{report.means[name].response:>12.5f}" for name in FEATURES
    ]
    lines += ["", f"{'change of':<24}{'with':<20}{'r':>8}{'overlap %':>12}"]
    lines += [
        f"{WORDS[pair.early]:<24}{WORDS[pair.late]:<20}{pair.correlation:>8.2f}{100 * pair.overlap:>12.1f}"
        for pair in report.foresight
    ]
    return "\n".join(lines)
