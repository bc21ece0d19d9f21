"""`remask profile-ops`: where the time of a policy's steps goes, and how near it comes to what the machine can do."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from remask.cli.options import check_folder, object_option
from remask.core.checks import whole
from remask_lab.arguments.shape import add_shape_options, open_with_requests, settings_of
from remask_lab.ops.operations import profile_operations
from remask_lab.ops.peaks import measure_peaks
from remask_lab.ops.plot import plot_roofline
from remask_lab.ops.report import OperationProfile, Peaks, Profile
from remask_lab.records.machine import machine
from remask_lab.records.record import Record, about, write_record

SUBJECT = "profile-ops"
LINES = 12  # of steps that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Run requests of random tokens together under a cache policy, and tell where their time goes: "
        "attention, MLP, projections, head, norms, sampling, packing and the rest."
    )
    parser.add_argument("--cache", default="none", help="policy, or a composition (default none)")
    parser.add_argument("--cache-config", metavar="JSON", help="its settings")
    parser.add_argument("--steps", type=int, default=32, help="steps profiled, from the first on (default 32)")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="K", help="turns with and without instruments (default 3)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the full result here")
    parser.add_argument("--plot", metavar="FILE", help="draw the roofline here, as PNG")
    add_shape_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and save what was asked for."""
    for name in ("steps", "rounds"):
        whole(f"--{name}", getattr(args, name), low=1)
    check_folder("--json", args.json)
    check_folder("--plot", args.plot)
    settings = object_option("--cache-config", args.cache_config)
    llm, workload = open_with_requests(args)
    policy = llm.policy(args.cache, settings)
    work = [task.request.with_policy(policy) for task in workload.tasks]
    profile = profile_operations(llm, work, steps=args.steps, rounds=args.rounds, progress=llm.progress)
    peaks = measure_peaks(llm.model.device, llm.model.dtype)
    facts = machine(llm)
    where = f"{facts['dtype']} on {facts.get('gpu', facts['cpu'])} ({facts['threads']} threads)"
    print(f"{llm.loaded.name}, {args.cache}: {len(profile.steps)} steps, {args.requests} requests at a time, {where}\n")
    print(text(profile, peaks))
    if args.json is not None:
        chosen = settings_of(args) | {name: getattr(args, name) for name in ("cache", "steps", "rounds")}
        chosen["cache_config"] = settings
        write_record(args.json, Record(SUBJECT, about(llm, seed=args.seed, settings=chosen), data(profile, peaks)))
        print(f"\nSaved as {args.json}")
    if args.plot is not None:
        plot_roofline(profile, peaks, f"{llm.loaded.name}, {args.cache}", args.plot)
        print(f"\nPicture: {args.plot}")
    return 0


def data(profile: Profile, peaks: Peaks) -> dict[str, Any]:
    """The profile as plain numbers, what follows from its parts included."""
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
    """The operations and what the steps reach, for people."""
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
            "| operation | ms a step | share | GFLOP a step | FLOP a byte | GFLOP/s |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"Without instruments a step takes {1e3 * bare / steps:.3g} ms; they add {100 * profile.overhead:.1f} %.",
            f"FLOPs: plans ask for {flops:,}, {executed:,} are run (padding, repeated projections), and PyTorch counts "
            f"{profile.counted:,}.",
            f"Machine: {peaks.flops_s / 1e9:.4g} GFLOP/s in a product, {peaks.bytes_s / 1e9:.4g} GB/s in a copy, "
            f"which meet at {peaks.ridge:.3g} FLOP a byte.",
            "",
            "| steps | row-layers | ms | GFLOP | FLOP a byte | GFLOP/s | of the roofline |",
            "|---|---|---|---|---|---|---|",
            *_steps(profile, shares),
        ]
    )


def _row(name: str, each: OperationProfile, steps: int) -> str:
    """A line of the table; what is no matrix product has no FLOPs."""
    work = [f"{each.flops / steps / 1e9:.3g}", f"{each.intensity:.3g}", f"{each.flops_s / 1e9:.3g}"]
    cells = [name, f"{1e3 * each.seconds / steps:.3g}", f"{100 * each.share:.1f} %", *(work if each.flops else "---")]
    return f"| {' | '.join(cells)} |"


def _roof_shares(profile: Profile, peaks: Peaks) -> list[float]:
    """What share of the attainable FLOPs a second each step reaches; 0 where it computes nothing."""
    return [step.flops_s / peaks.roof(step.intensity) if step.flops_s else 0.0 for step in profile.steps]


def _steps(profile: Profile, shares: Sequence[float]) -> list[str]:
    """A line for steps in a row that compute as much, medians of what they reach; of many lines the first ones."""
    lines, number = [], 1
    for row_layers, group in groupby(zip(profile.steps, shares, strict=True), lambda each: each[0].row_layers):
        steps, reached = zip(*group, strict=True)
        last = number + len(steps) - 1
        cells = [
            str(number) if number == last else f"{number} to {last}",
            f"{row_layers:,}",
            f"{1e3 * statistics.median(step.seconds for step in steps):.3g}",
            f"{statistics.median(sum(step.flops.values()) for step in steps) / 1e9:.3g}",
            f"{statistics.median(step.intensity for step in steps):.3g}",
            f"{statistics.median(step.flops_s for step in steps) / 1e9:.3g}",
            f"{100 * statistics.median(reached):.3g} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        number = last + 1
    left = len(lines) - LINES
    return lines if left <= 0 else [*lines[:LINES], "", f"{left} more lines like these; --json has every step."]
