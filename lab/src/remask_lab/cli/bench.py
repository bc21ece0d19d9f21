"""`remask bench`: compares cache policies side by side on one workload, in one run."""

import argparse
from dataclasses import asdict, replace
from functools import partial

from remask.checks import BUNDLED_TRANSIT
from remask.checks.values import json_list
from remask.cli.lines import RequestFile
from remask.cli.options import check_folder, engine_config, object_option, open_llm
from remask.errors import ConfigError
from remask.llm import LLM
from remask.machine.disk import write_whole
from remask.policies.registry import from_file
from remask.request.sampling_params import SamplingParams, merge_sampling
from remask.tasks import transit
from remask_lab.arguments import (
    CUSTOM_REQUESTS,
    WORKLOAD_OPTIONS,
    check_least,
    check_result_options,
    check_unset,
    check_workload_options,
    depths_option,
    draw_workload,
    input_lines,
    input_workload,
    required_input,
    sampling_options,
    save_pictures,
    split_names,
    task_option,
)
from remask_lab.bench import answers
from remask_lab.bench.bench import check_first_answers, run_bench
from remask_lab.bench.contenders import Contender, LeftOut, at_depths, contender, every_contender, variants
from remask_lab.bench.fewer_steps import OFF, asked_step_baselines
from remask_lab.bench.names import COMPARED_CACHES, PREFIXES
from remask_lab.bench.plot import plot_bench
from remask_lab.bench.report import csv_text, table
from remask_lab.bench.workload import Workload, chat_workload, conversation_workload, own_task
from remask_lab.cli.options import ALL, REQUESTS
from remask_lab.records.record import write_record


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and put the result where the options say."""
    _check_options(args)
    limits = engine_config(args)  # what cannot be combined is refused now, not between two rows
    limits = replace(limits, max_num_seqs=args.concurrency or limits.max_num_seqs, prefix_match="exact")
    lines = input_lines(args)
    reads = required_input(task_option(args)) if args.prompt is None else "text"
    with open_llm(args, engine=limits, reads=reads) as llm:
        workload = _workload(llm, args, lines)
        if args.metric is None:
            check_first_answers(llm, workload, llm.session.engine_config)
        rows, left_out = _contenders(llm, args, workload)
        detail = args.detail or args.caches == ALL
        judged = {"answers": args.metric is None, "losses": args.metric == "agreement"}
        shown = args.answers or args.page is not None
        record = run_bench(
            llm,
            workload,
            rows,
            args.rounds,
            llm.session.engine_config,
            args.progress,
            detail=detail,
            audits=True,
            responses=shown,
            **judged,
        )
    record.data["left_out"] = [asdict(left) for left in left_out]
    if args.json:
        write_record(args.json, record)
    if args.csv:
        write_whole("--csv:", args.csv, csv_text(record))
    print(table(record, detail=detail))
    if args.answers:
        print(f"\n{answers.text(record)}")
    if args.page:
        write_whole("--page:", args.page, answers.page(record))
        print(f"\nPage: {args.page}")
    if args.plots:
        save_pictures(partial(plot_bench, record), args.plots)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise `ConfigError` on what no model could run, before one is loaded."""
    check_least(args, concurrency=1, rounds=1)
    check_folder("--json", args.json)
    check_result_options(args)
    check_workload_options(args)
    depths_option(args.depths, 0)
    object_option("--cache-config", args.cache_config)
    if args.variants is not None:
        check_unset(args, "--variants names all rows", "caches", "cache_config", "depths", "without_prefix")
    if args.prompt is not None:
        check_unset(args, "--prompt is one request", "requests")
    if args.prompt is not None or args.input is not None:
        check_unset(args, CUSTOM_REQUESTS, *WORKLOAD_OPTIONS, "without_prefix")
    elif args.requests is None:
        args.requests = REQUESTS
    if args.prefix_match != "longest":
        return
    if args.prefix_tokens is not None or args.prompt_tokens is not None:
        raise ConfigError("--prefix-tokens and --prompt-tokens shape random workloads; conversations have their own")
    if args.without_prefix:
        raise ConfigError("--without-prefix asks single questions, not turns of conversations; leave one of them out")


def _workload(llm: LLM, args: argparse.Namespace, lines: RequestFile | None) -> Workload:
    if args.prompt is not None or lines is not None:
        return input_workload(llm, args, lines)
    if args.prefix_match != "longest":
        return draw_workload(llm, args)
    task = task_option(args) or own_task(llm)
    if task.name != "transit":
        raise ConfigError(
            f"--prefix-match longest asks for turns of conversations, which the task {task.name} does not have; "
            f"give --task transit, for which {BUNDLED_TRANSIT!r} is made"
        )
    if task.settings is not None:
        raise ConfigError("--prefix-match longest asks about lines of the usual length; leave --task-settings out")
    params = SamplingParams.from_mapping(merge_sampling(transit.SAMPLING, sampling_options(args)))
    return conversation_workload(llm, args.requests, args.prefixes or PREFIXES, args.seed, params)


def _contenders(llm: LLM, args: argparse.Namespace, workload: Workload) -> tuple[list[Contender], list[LeftOut]]:
    settings = object_option("--cache-config", args.cache_config)
    left_out: list[LeftOut] = []
    caches = ",".join(COMPARED_CACHES[llm.loaded.config.kind]) if args.caches is None else args.caches
    if args.variants is not None:
        rows = variants(llm, json_list("--variants", args.variants), workload)
    elif caches == ALL:
        rows, left_out = every_contender(llm, workload, settings)
    else:
        names = dict.fromkeys(["none", *split_names(caches)])
        rows = [contender(llm, *from_file(name, settings.get(name), "--caches"), workload) for name in names]
    known = [row.name for row in rows] + [left.name for left in left_out] + split_names(caches)
    for name in settings:
        if name not in known:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {caches}")
    rows += at_depths(llm, workload, depths_option(args.depths, llm.loaded.config.layers), settings.get("bicache"))
    if args.prefix_match == "longest":
        rows += [replace(row, name=f"{row.name}, longest", prefix_match="longest") for row in rows[1:]]
    own = any(getattr(args, name) is not None for name in ("variants", "prompt", "input"))
    words = OFF if own and args.baseline_steps is None else args.baseline_steps
    baselines, unmade = asked_step_baselines(llm, words, workload, rows, llm.session.engine_config)
    rows, left_out = rows + baselines, left_out + unmade
    if args.without_prefix:
        sampling = workload.tasks[0].request.params
        task = task_option(args) or own_task(llm)
        bare = chat_workload(llm, task, args.requests, workload.prefixes, args.seed, sampling, with_prefix=False)
        rows.append(
            Contender("none, prefix removed", llm.session.policy("none"), replace(bare, prefixes=workload.prefixes))
        )
    return rows, left_out
