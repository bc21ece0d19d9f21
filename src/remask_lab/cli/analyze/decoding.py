"""`remask analyze decoding`: K and V of a token before, at and after the step that decodes it."""

import argparse
from dataclasses import asdict
from typing import Any

from remask.core.checks import whole
from remask_lab.arguments.requests import add_request_options, open_requests, save
from remask_lab.subjects.decoding import measure_decoding
from remask_lab.subjects.decoding_report import DecodingReport, reading
from remask_lab.subjects.plots.decoding import plot_decoding


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    decoding = subjects.add_parser("decoding", help="how K and V move around the step that decodes a token, by layer")
    decoding.add_argument(
        "--window", type=int, default=8, metavar="N", help="passes before and after it that are told (default 8)"
    )
    add_request_options(decoding)
    decoding.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print table and reading, and save what was asked for."""
    whole("--window", args.window, low=1)
    llm, work = open_requests(args)
    report = measure_decoding(llm, work, args.window, progress=llm.progress)
    told = reading(report)
    print(text(report), told, sep="\n\n")
    data = asdict(report) | {"reading": told}
    save(args, llm, work, data, lambda: plot_decoding(report, args.plots), window=args.window)
    return 0


def text(report: DecodingReport) -> str:
    """The mean curves, for people."""
    names = list(report.aligned)
    lines = [
        f"{report.model}: {report.layers} layers; {report.requests} requests, {report.passes} passes",
        "",
        f"{'offset':>6}{'tokens':>8}" + "".join(f"{name:>14}" for name in names),
    ]
    for place, (offset, count) in enumerate(zip(report.offsets, report.counts, strict=True)):
        if count:
            values = "".join(f"{report.aligned[name].mean[place]:>14.3e}" for name in names)
            lines.append(f"{offset:>6}{count:>8}{values}")
    return "\n".join(lines)
