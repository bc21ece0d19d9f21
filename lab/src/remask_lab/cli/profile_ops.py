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
LINES = 12  # most lines of steps that are printed


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the record and the picture where options ask for them."""
    check_least(args, steps=1, rounds=1)
    check_folder("--json", args.json)
    check_folder("--plot", args.plot)
    if args.plot is not None:
        check_drawing()
    settings = object_option("--cache-config", args.cache_config)
    llm, workload = open_with_requests(args)
    policy = llm.session.policy(args.cache, settings)
    work = [task.request.with_policy(policy) for task in workload.tasks]
    profile = profile_operations(llm, work, steps=args.steps, rounds=args.rounds, progress=llm.session.progress)
    peaks = measure_peaks(llm.model.device, llm.model.dtype)
    chosen = shape_settings(args) | {name: getattr(args, name) for name in ("cache", "steps", "rounds")}
    facts = about(llm, seed=args.seed, settings=chosen | {"cache_config": settings})
    where = f"{number_format(facts)} on {processor_text(facts['machine'])}"
    print(f"{llm.loaded.name}, {args.cache}: {len(profile.steps)} steps, {args.requests} requests at a time, {where}\n")
    print(text(profile, peaks))
    if args.json is not None:
        write_record(args.json, Record(SUBJECT, facts, data(profile, peaks)))
        print(f"\nSaved as {args.json}")
    if args.plot is not None:
        plot_roofline(profile, peaks, f"{llm.loaded.name}, {args.cache}", args.plot)
        print(f"\nPicture: {args.plot}")
    return 0


def data(profile: Profile, peaks: Peaks) -> dict[str, Any]:
    """The profile as plain numbers, with the rates that follow from them."""
    steps = [
        asdict(step) | {"intensity": step.intensity, "flops_s": step.flops_s, "roof_share": share}
        for step, share in zip(profile.steps, _roof_shares(profile, peaks), strict=True)
    ]
    operations = {
        name: asdict(each) | {"intensity": each.intensity, "flops_s": each.flops_s}
        for name, each in profile.operations.items()
    }
    return asdict(profile) | {"steps": steps, "operations": operations, "peaks": asdict(peaks)}


def text(profile: Profile, peaks: Peaks) -> str:
    """The operations, the totals, and the steps as text."""
    steps = len(profile.steps)
    rows = [_row(name, each, steps) for name, each in profile.operations.items() if each.seconds]
    whole = sum(each.seconds for each in profile.operations.values())
    flops, moved = (sum(getattr(each, name) for each in profile.operations.values()) for name in ("flops", "bytes"))
    rows.append(_row("all", OperationProfile(whole, 1.0, flops, moved), steps))
    shares = _roof_shares(profile, peaks)
    bare = sum(step.seconds for step in profile.steps)
    executed = sum(step.executed for step in profile.steps)
    return "\n".join(
        [
            markdown_table(["operation", "ms a step", "share", "GFLOP a step", "FLOP a byte", "GFLOP/s"], rows),
            "",
            f"Without instruments a step takes {1e3 * bare / steps:.3g} ms; they add {100 * profile.overhead:.1f} %.",
            f"FLOPs: plans ask for {flops:,}, {executed:,} are run (padding, repeated projections), and PyTorch counts "
            f"{profile.counted:,}.",
            f"Machine: {peaks.flops_s / 1e9:.4g} GFLOP/s in a product, {peaks.bytes_s / 1e9:.4g} GB/s in a copy, "
            f"which meet at {peaks.ridge:.3g} FLOP a byte.",
            "",
            *_steps(profile, shares),
        ]
    )


def _row(name: str, each: OperationProfile, steps: int) -> list[str]:
    """The cells of an operation. One that is no matrix product has no FLOPs."""
    work = [f"{each.flops / steps / 1e9:.3g}", f"{each.intensity:.3g}", f"{each.flops_s / 1e9:.3g}"]
    return [name, f"{1e3 * each.seconds / steps:.3g}", f"{100 * each.share:.1f} %", *(work if each.flops else "---")]


def _roof_shares(profile: Profile, peaks: Peaks) -> list[float]:
    """The share of the attainable FLOPs a second that each step reaches. 0 where it computes nothing."""
    return [step.flops_s / peaks.roof(step.intensity) if step.flops_s else 0.0 for step in profile.steps]


def _steps(profile: Profile, shares: Sequence[float]) -> list[str]:
    """A table with one line for adjacent steps of equal work, as medians. Only the first `LINES` lines are shown."""
    header = ["steps", "row-layers", "ms", "GFLOP", "FLOP a byte", "GFLOP/s", "of the roofline"]
    lines, number = [], 1
    for row_layers, group in groupby(zip(profile.steps, shares, strict=True), lambda each: each[0].row_layers):
        steps, reached = zip(*group, strict=True)
        last = number + len(steps) - 1
        lines.append(
            [
                str(number) if number == last else f"{number} to {last}",
                f"{row_layers:,}",
                f"{1e3 * statistics.median(step.seconds for step in steps):.3g}",
                f"{statistics.median(sum(step.flops.values()) for step in steps) / 1e9:.3g}",
                f"{statistics.median(step.intensity for step in steps):.3g}",
                f"{statistics.median(step.flops_s for step in steps) / 1e9:.3g}",
                f"{100 * statistics.median(reached):.3g} %",
            ]
        )
        number = last + 1
    left = len(lines) - LINES
    table = markdown_table(header, lines[:LINES])
    return [table] if left <= 0 else [table, "", f"{left} more lines like these; --json has every step."]
