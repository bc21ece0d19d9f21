"""`remask bench`: compares cache policies side by side on one workload, in one run."""

import argparse
from dataclasses import asdict, replace

from remask.checkpoint.source import BUNDLED_TRANSIT
from remask.cli.options import (
    add_batch_invariant,
    add_model_options,
    add_tensor_parallel,
    check_folder,
    object_option,
    open_llm,
)
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask.store.prefix_index import PREFIX_MATCHES
from remask_lab.arguments.common import COMPARED_CACHES, check_least, separated
from remask_lab.arguments.workload import add_workload_options, asked_sampling, asked_task, asked_workload
from remask_lab.bench.bench import run_bench
from remask_lab.bench.by_depth import at_depths
from remask_lab.bench.contenders import Contender, LeftOut, contender, every_contender
from remask_lab.bench.fewer_steps import step_baselines
from remask_lab.bench.report import table
from remask_lab.bench.workload import (
    PREFIXES,
    TRANSIT_SAMPLING,
    Workload,
    chat_workload,
    conversation_workload,
    own_task,
)
from remask_lab.records.record import write_record

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Compare cache policies side by side: on their own tasks for the bundled models, on GSM8K "
        "questions for a model with a chat template, and on random tokens for all others or where lengths are given. "
        "'remask bench serve' puts load on a running server."
    )
    parser.add_argument(
        "--caches",
        help="policies, separated by commas (default: what suits the model's kind, as none,reuse,bicache or "
        "none,block-prefix,uniform-cache); 'all' for every one and their usual compositions, in detail",
    )
    parser.add_argument("--cache-config", metavar="JSON", help='settings, as one object per policy: {"bicache": {}}')
    parser.add_argument("--depths", metavar="B,B,...", help="also bicache at these depths; 'all' for every one")
    parser.add_argument(
        "--baseline-steps",
        metavar="N,...",
        help="also 'none' in fewer steps: a number, 'half' of them, or as 'few' as compute the work of each cache",
    )
    parser.add_argument(
        "--detail",
        action="store_true",
        help="also one request at a time, forwards, row-layers, cache ratio, staleness and extra memory",
    )
    parser.add_argument("--without-prefix", action="store_true", help="also 'none' without the shared prefix")
    parser.add_argument(
        "--prefix-match",
        default="exact",
        choices=PREFIX_MATCHES,
        help="longest: run turns of conversations, and compare reading the longest stored prefix with exact matches",
    )
    parser.add_argument(
        "--concurrency", type=int, default=8, metavar="C", help="requests that run at a time (default 8)"
    )
    add_batch_invariant(parser)
    add_workload_options(parser, requests=200)
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="turns of each policy (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the full result to FILE")
    add_model_options(parser)
    add_tensor_parallel(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the record where `--json` asks for it."""
    check_least(args, concurrency=1, rounds=1)
    check_folder("--json", args.json)
    limits = EngineConfig(max_num_seqs=args.concurrency, batch_invariant=args.batch_invariant)
    replace(limits, prefix_match=args.prefix_match)  # what cannot be combined is refused now, not between two rows
    with open_llm(args, engine=limits) as llm:
        workload = _workload(llm, args)
        rows, left_out = _contenders(llm, args, workload)
        detail = args.detail or args.caches == ALL
        record = run_bench(llm, workload, rows, args.rounds, llm.engine_config, not args.quiet, detail=detail)
    record.data["left_out"] = [asdict(left) for left in left_out]
    if args.json:
        write_record(args.json, record)
    print(table(record, detail=detail))
    return 0


def _workload(llm: LLM, args: argparse.Namespace) -> Workload:
    if args.prefix_match != "longest":
        return asked_workload(llm, args)
    task = asked_task(args) or own_task(llm)
    if task.name != "transit":
        raise ConfigError(
            f"--prefix-match longest asks for turns of conversations, which the task {task.name} does not have; "
            f"give --task transit, for which {BUNDLED_TRANSIT!r} is made"
        )
    if task.settings is not None:
        raise ConfigError("--prefix-match longest asks about lines of the usual length; leave --task-settings out")
    if args.prefix_tokens is not None or args.prompt_tokens is not None:
        raise ConfigError("--prefix-tokens and --prompt-tokens shape random workloads; conversations have their own")
    params = SamplingParams.from_mapping({**TRANSIT_SAMPLING, **asked_sampling(args)})
    return conversation_workload(llm, args.requests, args.prefixes or PREFIXES, args.seed, params)


def _contenders(llm: LLM, args: argparse.Namespace, workload: Workload) -> tuple[list[Contender], list[LeftOut]]:
    settings = object_option("--cache-config", args.cache_config)
    left_out: list[LeftOut] = []
    caches = ",".join(COMPARED_CACHES[llm.loaded.config.kind]) if args.caches is None else args.caches
    if caches == ALL:
        rows, left_out = every_contender(llm, workload, settings)
    else:
        names = dict.fromkeys(["none", *separated(caches)])
        rows = [contender(llm, name, settings.get(name), workload) for name in names]
    known = [row.name for row in rows] + [left.name for left in left_out]
    for name in settings:
        if name not in known:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {caches}")
    rows += at_depths(llm, workload, _depths(args.depths, llm.loaded.config.layers), settings.get("bicache"))
    if args.prefix_match == "longest":
        rows += [replace(row, name=f"{row.name}, longest", prefix_match="longest") for row in rows[1:]]
    if args.baseline_steps is not None:
        baselines, unmade = step_baselines(llm, args.baseline_steps, workload, rows, llm.engine_config)
        rows, left_out = rows + baselines, left_out + unmade
    if args.without_prefix:
        if args.prefix_match == "longest":
            raise ConfigError(
                "--without-prefix asks single questions, not turns of conversations; leave one of them out"
            )
        sampling = workload.tasks[0].request.params
        task = asked_task(args) or own_task(llm)
        bare = chat_workload(llm, task, args.requests, workload.prefixes, args.seed, sampling, with_prefix=False)
        rows.append(Contender("none, prefix removed", llm.policy("none"), replace(bare, prefixes=workload.prefixes)))
    return rows, left_out


def _depths(text: str | None, layers: int) -> list[int]:
    if text is None:
        return []
    if text == "all":
        return list(range(layers + 1))
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--depths must be numbers of layers separated by commas, or 'all'; got {text!r}") from error
