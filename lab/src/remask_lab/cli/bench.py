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
from remask_lab.bench.fewer_steps import OFF, step_baselines_option
from remask_lab.bench.names import COMPARED_CACHES, PREFIXES
from remask_lab.bench.plot import plot_bench
from remask_lab.bench.report import csv_text, table
from remask_lab.bench.workload import Workload, chat_workload, conversation_workload, own_task
from remask_lab.cli.options import ALL, REQUESTS
from remask_lab.records.record import write_record


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that options name. Returns 0."""
    _check_options(args)
    limits = engine_config(args)  # an impossible combination is refused now, not between two rows
    limits = replace(limits, max_num_seqs=args.concurrency or limits.max_num_seqs, prefix_match="exact")
    lines = input_lines(args)
    reads = required_input(task_option(args)) if args.prompt is None else "text"
    with open_llm(args, engine=limits, reads=reads) as llm:
        workload = _workload(llm, args, lines)
        if args.metric is None:
            check_first_answers(llm, workload, llm.session.engine_config)
        rows, left_out = _contenders(llm, args, workload)
        detail = args.detail or args.caches == ALL
        record = run_bench(
            llm,
            workload,
            rows,
            args.rounds,
            llm.session.engine_config,
            args.progress,
            detail=detail,
            answers=args.metric is None,
            losses=args.metric == "agreement",
            audits=True,
            responses=args.answers or args.page is not None,
        )
    record.data["left_out"] = [asdict(policy) for policy in left_out]
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
    """Raise `ConfigError` on options that no model could run, before one is loaded. Sets the default of --requests."""
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
    """The requests of --prompt or of the `lines` of --input, or those of a task, with --prefix-match longest as turns.

    Raises `ConfigError` on options that the task or the model does not have.
    """
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
    return conversation_workload(
        llm, requests=args.requests, prefixes=args.prefixes or PREFIXES, seed=args.seed, sampling=params
    )


def _contenders(llm: LLM, args: argparse.Namespace, workload: Workload) -> tuple[list[Contender], list[LeftOut]]:
    """The rows that options name, and those of them that cannot run.

    Raises `ConfigError` on settings of a policy without a row, and on rows that cannot run but were named.
    """
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
    policies = {row.name for row in rows} | {policy.name for policy in left_out} | set(split_names(caches))
    for name in settings:
        if name not in policies:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {caches}")
    rows += at_depths(llm, workload, depths_option(args.depths, llm.loaded.config.layers), settings.get("bicache"))
    if args.prefix_match == "longest":
        rows += [replace(row, name=f"{row.name}, longest", prefix_match="longest") for row in rows[1:]]
    no_default = any(getattr(args, name) is not None for name in ("variants", "prompt", "input"))
    steps = OFF if no_default and args.baseline_steps is None else args.baseline_steps
    baselines, impossible = step_baselines_option(llm, steps, workload, rows, llm.session.engine_config)
    rows, left_out = rows + baselines, left_out + impossible
    if args.without_prefix:
        task, sampling = task_option(args) or own_task(llm), workload.tasks[0].request.params
        counts = {"requests": args.requests, "prefixes": workload.prefixes}
        bare = chat_workload(llm, task, **counts, seed=args.seed, sampling=sampling, with_prefix=False)
        bare = replace(bare, prefixes=workload.prefixes)
        rows.append(Contender("none, prefix removed", llm.session.policy("none"), workload=bare))
    return rows, left_out
