"""`remask profile-ops`: where the time of a policy's steps goes, and how near it comes to what the machine can do."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from remask.cli.options import add_model_options, check_folder, object_option, open_llm
from remask.core.sampling import SamplingParams
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.evals.machine import machine
from remask.evals.record import Record, about, write_record
from remask.evals.workload import random_workload
from remask.llm import LLM, Work
from remask.plots.roofline import plot_roofline
from remask.profiling.operations import profile_operations
from remask.profiling.peaks import measure_peaks
from remask.profiling.report import OperationProfile, Peaks, Profile

SUBJECT = "profile-ops"


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        SUBJECT,
        help="time a policy's operations, and set them against the machine's roofline",
        description="Run requests of random tokens together under a cache policy, and tell where their time goes: "
        "attention, MLP, projections, head, norms, sampling, packing and the rest.",
    )
    parser.add_argument("--cache", default="none", help="policy, or a composition (default none)")
    parser.add_argument("--cache-config", metavar="JSON", help="its settings")
    parser.add_argument("--requests", type=int, default=4, metavar="N", help="requests run at a time (default 4)")
    parser.add_argument(
        "--prefix-tokens", type=int, default=192, metavar="P", help="tokens that they share (default 192)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="Q", help="tokens after them (default 64)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="G", help="response length (default 128)")
    parser.add_argument("--sampling", metavar="JSON", help="further sampling parameters")
    parser.add_argument("--steps", type=int, default=32, help="steps profiled, from the first on (default 32)")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="K", help="turns with and without instruments (default 3)"
    )
    parser.add_argument("--seed", type=int, default=2024, help="of the tokens")
    parser.add_argument("--json", metavar="FILE", help="write the full result here")
    parser.add_argument("--plot", metavar="FILE", help="draw the roofline here, as PNG")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and save what was asked for."""
    for name in ("requests", "prompt_tokens", "max_tokens", "steps", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.prefix_tokens < 0:
        raise ConfigError(f"--prefix-tokens must be at least 0, got {args.prefix_tokens}")
    check_folder("--json", args.json)
    check_folder("--plot", args.plot)
    settings = object_option("--cache-config", args.cache_config)
    own = {"max_tokens": args.max_tokens, "seed": args.seed, "ignore_eos": True}
    params = SamplingParams.from_mapping({**own, **object_option("--sampling", args.sampling)})
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0))
    params, limits = _shape(llm, args, params)
    workload = random_workload(llm, args.requests, 1, args.seed, params, args.prefix_tokens, args.prompt_tokens)
    policy = llm.policy(args.cache, settings)
    work = [Work(task.request, policy) for task in workload.tasks]
    profile = profile_operations(llm, work, limits, steps=args.steps, rounds=args.rounds, progress=llm.progress)
    peaks = measure_peaks(llm.model.device, llm.model.dtype)
    facts = machine(llm)
    where = f"{facts['dtype']} on {facts.get('gpu', facts['cpu'])} ({facts['threads']} threads)"
    print(f"{llm.loaded.name}, {args.cache}: {len(profile.steps)} steps, {args.requests} requests at a time, {where}\n")
    print(text(profile, peaks))
    if args.json is not None:
        names = ("cache", "requests", "prefix_tokens", "prompt_tokens", "max_tokens", "steps", "rounds", "sampling")
        chosen = {name: getattr(args, name) for name in names} | {"cache_config": settings}
        write_record(args.json, Record(SUBJECT, about(llm, seed=args.seed, settings=chosen), data(profile, peaks)))
        print(f"\nSaved as {args.json}")
    if args.plot is not None:
        plot_roofline(profile, peaks, f"{llm.loaded.name}, {args.cache}", args.plot)
        print(f"Picture: {args.plot}")
    return 0


def _shape(llm: LLM, args: argparse.Namespace, params: SamplingParams) -> tuple[SamplingParams, EngineConfig]:
    """Sampling with a uniform model's canvas no longer than it must be, and an engine with room for the requests alone.

    Raises `ConfigError` where the model has too few positions.
    """
    config = llm.loaded.config
    length = args.prefix_tokens + args.prompt_tokens + params.max_tokens
    if config.kind == "uniform":
        length = params.canvas_length or length
        params = replace(params, canvas_length=length)
    if config.kind == "block_causal":
        block = params.block_length or config.block_length or 1
        length = -(-length // block) * block
    if length > config.max_length:
        raise ConfigError(
            f"--prefix-tokens, --prompt-tokens and --max-tokens make {length} positions, and the model has "
            f"{config.max_length}; lower one of them"
        )
    canvases = args.requests * (2 if params.cfg_scale > 0 else 1)
    # An entry must be strictly smaller than the store's budget.
    return params, EngineConfig(max_num_seqs=canvases, max_model_len=length, store_budget_tokens=args.prefix_tokens + 1)


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
            f"Steps do {_span([step.intensity for step in profile.steps])} FLOP a byte, and reach "
            f"{_span([100 * share for share in shares])} % of the roofline there (median "
            f"{100 * statistics.median(shares):.3g} %).",
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


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"
