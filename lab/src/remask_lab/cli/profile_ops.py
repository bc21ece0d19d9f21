"""`remask profile ops`: times the operations of a policy's steps, and compares them with the machine's roofline."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from remask.cli.options import check_folder, object_option
from remask_lab.arguments import check_least, open_with_requests, shape_settings
from remask_lab.drawing import check_drawing
from remask_lab.ops.operations import OperationProfile, Profile, profile_operations
from remask_lab.ops.roofline import Peaks, measure_peaks, plot_roofline
from remask_lab.records.machine import processor_text
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, about, number_format, write_record

SUBJECT = "profile ops"
LINES = 12  # the largest number of printed lines of the table of steps


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that options name. Returns 0."""
    check_least(args, steps=1, rounds=1)
    check_folder("--json", args.json)
    check_folder("--plot", args.plot)
    if args.plot is not None:
        check_drawing()
    settings = object_option("--cache-config", args.cache_config)
    llm, workload = open_with_requests(args)
    policy = llm.session.policy(args.cache, settings)
    requests = [task.request.with_policy(policy) for task in workload.tasks]
    profile = profile_operations(llm, requests, steps=args.steps, rounds=args.rounds, progress=llm.session.progress)
    peaks = measure_peaks(llm.model.device, llm.model.dtype)
    options = shape_settings(args) | {name: getattr(args, name) for name in ("cache", "steps", "rounds")}
    facts = about(llm, seed=args.seed, settings=options | {"cache_config": settings})
    place = f"{number_format(facts)} on {processor_text(facts['machine'])}"
    print(f"{llm.loaded.name}, {args.cache}: {len(profile.steps)} steps, {args.requests} requests at a time, {place}\n")
    print(text(profile, peaks))
    if args.json is not None:
        write_record(args.json, Record(SUBJECT, facts, data(profile, peaks)))
        print(f"\nSaved as {args.json}")
    if args.plot is not None:
        plot_roofline(profile, peaks, f"{llm.loaded.name}, {args.cache}", args.plot)
        print(f"\nPicture: {args.plot}")
    return 0


def data(profile: Profile, peaks: Peaks) -> dict[str, Any]:
    """The data of a record: the profile, with intensities and rates of its steps and operations, and the peaks."""
    steps = [
        asdict(step) | {"intensity": step.intensity, "flops_s": step.flops_s, "roof_share": share}
        for step, share in zip(profile.steps, _roof_shares(profile, peaks), strict=True)
    ]
    operations = {
        name: asdict(operation) | {"intensity": operation.intensity, "flops_s": operation.flops_s}
        for name, operation in profile.operations.items()
    }
    return asdict(profile) | {"steps": steps, "operations": operations, "peaks": asdict(peaks)}


def text(profile: Profile, peaks: Peaks) -> str:
    """A table of the operations, sentences on the totals and the machine's peaks, and a table of the steps."""
    steps = len(profile.steps)
    operations = profile.operations
    rows = [_row(name, operation, steps) for name, operation in operations.items() if operation.seconds]
    flops = sum(operation.flops for operation in operations.values())
    moved_bytes = sum(operation.bytes for operation in operations.values())
    operation_seconds = sum(operation.seconds for operation in operations.values())
    rows.append(_row("all", OperationProfile(operation_seconds, 1.0, flops, moved_bytes), steps))
    shares = _roof_shares(profile, peaks)
    step_ms = 1e3 * sum(step.seconds for step in profile.steps) / steps
    executed = sum(step.executed for step in profile.steps)
    return "\n".join(
        [
            markdown_table(["operation", "ms a step", "share", "GFLOP a step", "FLOP a byte", "GFLOP/s"], rows),
            "",
            f"Without instruments a step takes {step_ms:.3g} ms; they add {100 * profile.overhead:.1f} %.",
            f"FLOPs: plans ask for {flops:,}, {executed:,} are run (padding, repeated projections), and PyTorch counts "
            f"{profile.counted:,}.",
            f"Machine: {peaks.flops_s / 1e9:.4g} GFLOP/s in a product, {peaks.bytes_s / 1e9:.4g} GB/s in a copy, "
            f"which meet at {peaks.ridge:.3g} FLOP a byte.",
            "",
            *_step_table(profile, shares),
        ]
    )


def _row(name: str, operation: OperationProfile, steps: int) -> list[str]:
    """The cells of an operation; FLOPs are counted in matrix products alone."""
    rates = [f"{operation.flops / steps / 1e9:.3g}", f"{operation.intensity:.3g}", f"{operation.flops_s / 1e9:.3g}"]
    time = [f"{1e3 * operation.seconds / steps:.3g}", f"{100 * operation.share:.1f} %"]
    return [name, *time, *(rates if operation.flops else ["-", "-", "-"])]


def _roof_shares(profile: Profile, peaks: Peaks) -> list[float]:
    """The FLOPs a second of each step as a share of the roofline's at its intensity; 0 for a step without FLOPs."""
    return [step.flops_s / peaks.roof(step.intensity) if step.flops_s else 0.0 for step in profile.steps]


def _step_table(profile: Profile, shares: Sequence[float]) -> list[str]:
    """A table with a line of medians for each run of steps with equal row-layers, and a note on lines that it omits.

    `shares` are the steps' `_roof_shares`. The table has at most `LINES` lines.
    """
    header = ["steps", "row-layers", "ms", "GFLOP", "FLOP a byte", "GFLOP/s", "of the roofline"]
    lines: list[list[str]] = []
    start = 1
    for row_layers, group in groupby(zip(profile.steps, shares, strict=True), lambda pair: pair[0].row_layers):
        steps, step_shares = zip(*group, strict=True)
        end = start + len(steps) - 1
        lines.append(
            [
                str(start) if start == end else f"{start} to {end}",
                f"{row_layers:,}",
                f"{1e3 * statistics.median(step.seconds for step in steps):.3g}",
                f"{statistics.median(sum(step.flops.values()) for step in steps) / 1e9:.3g}",
                f"{statistics.median(step.intensity for step in steps):.3g}",
                f"{statistics.median(step.flops_s for step in steps) / 1e9:.3g}",
                f"{100 * statistics.median(step_shares):.3g} %",
            ]
        )
        start = end + 1
    omitted = len(lines) - LINES
    table = markdown_table(header, lines[:LINES])
    return [table] if omitted <= 0 else [table, "", f"{omitted} more lines like these; --json has every step."]
