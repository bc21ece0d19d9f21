"""`remask analyze drift`: what changes from pass to pass in a model without a cache."""

import argparse
from dataclasses import asdict
from typing import Any

from remask_lab.arguments.requests import add_request_options, open_requests, save
from remask_lab.subjects.drift import measure_drift
from remask_lab.subjects.plots.drift import plot_drift
from remask_lab.subjects.report import DriftReport, reading


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    drift = subjects.add_parser("drift", help="K/V drift, attention mass, entropy and token changes by region and pass")
    add_request_options(drift)
    drift.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and save what was asked for."""
    llm, work = open_requests(args)
    report = measure_drift(llm, work, progress=llm.progress)
    told = reading(report)
    print(text(report), told, sep="\n\n")
    save(args, llm, work, asdict(report) | {"reading": told}, lambda: plot_drift(report, args.plots))
    return 0


def text(report: DriftReport) -> str:
    """The means by region and the correlations, for people."""
    subject = report.subject
    lines = [
        f"{subject.model}: {subject.family}, {subject.layers} layers, {subject.dtype}; {len(subject.passes)} requests, "
        f"{sum(subject.passes)} passes, blocks of {subject.block_length}",
        "",
        "             drift, cosine distance a pass       within a block",
        f"{'region':<12}{'K':>12}{'V':>12}{'K':>12}{'V':>12}{'attention %':>13}",
    ]
    for name, means in report.regions.items():
        drifts = (means.k_drift, means.v_drift, means.k_within, means.v_within)
        lines.append(f"{name:<12}" + "".join(f"{value:>12.2e}" for value in drifts) + f"{100 * means.attention:>13.1f}")
    lines += [
        "",
        f"tokens changed a pass: {100 * sum(report.change_rate) / len(report.change_rate):.2f} % of the response",
        f"entropy: {report.entropy[0]:.2f} nats in the first pass, {report.entropy[-1]:.2f} in the last",
        f"correlation of K and V drift: {report.kv_correlation:.2f}; between layers: K {report.k_layers_mean:.2f}, "
        f"V {report.v_layers_mean:.2f}",
    ]
    return "\n".join(lines)
