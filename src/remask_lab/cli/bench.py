"""`remask bench`: compares cache policies side by side on one workload, in one run."""

import argparse
from dataclasses import asdict, replace
from functools import partial

from remask.checkpoint.bundled import BUNDLED_TRANSIT
from remask.cli.options import check_folder, object_option, open_llm
from remask.cli.policy_file import policy_option
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.machine.disk import write_whole
from remask.request.sampling_params import SamplingParams
from remask_lab.arguments.common import check_least, separated
from remask_lab.asked.results import check_result_options, keep_pictures
from remask_lab.asked.workload import asked_sampling, asked_task, asked_workload
from remask_lab.bench.bench import run_bench
from remask_lab.bench.by_depth import at_depths
from remask_lab.bench.contenders import Contender, LeftOut, contender, every_contender
from remask_lab.bench.fewer_steps import asked_step_baselines
from remask_lab.bench.names import COMPARED_CACHES, PREFIXES
from remask_lab.bench.plot import plot_bench
from remask_lab.bench.report import csv_text, table
from remask_lab.bench.workload import TRANSIT_SAMPLING, Workload, chat_workload, conversation_workload, own_task
from remask_lab.cli.arguments.bench import ALL
from remask_lab.records.record import write_record


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and put the result where the options say."""
    check_least(args, concurrency=1, rounds=1)
    check_folder("--json", args.json)
    check_result_options(args)
    limits = EngineConfig(max_num_seqs=args.concurrency, batch_invariant=args.batch_invariant)
    replace(limits, prefix_match=args.prefix_match)  # what cannot be combined is refused now, not between two rows
    with open_llm(args, engine=limits) as llm:
        workload = _workload(llm, args)
        rows, left_out = _contenders(llm, args, workload)
        detail = args.detail or args.caches == ALL
        record = run_bench(llm, workload, rows, args.rounds, llm.engine_config, args.progress, detail=detail)
    record.data["left_out"] = [asdict(left) for left in left_out]
    if args.json:
        write_record(args.json, record)
    if args.csv:
        write_whole("--csv:", args.csv, csv_text(record))
    print(table(record, detail=detail))
    if args.plots:
        keep_pictures(partial(plot_bench, record), args.plots)
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
        rows = [contender(llm, *policy_option(name, settings.get(name)), workload) for name in names]
    known = [row.name for row in rows] + [left.name for left in left_out] + separated(caches)
    for name in settings:
        if name not in known:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {caches}")
    rows += at_depths(llm, workload, _depths(args.depths, llm.loaded.config.layers), settings.get("bicache"))
    if args.prefix_match == "longest":
        rows += [replace(row, name=f"{row.name}, longest", prefix_match="longest") for row in rows[1:]]
    baselines, unmade = asked_step_baselines(llm, args.baseline_steps, workload, rows, llm.engine_config)
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
