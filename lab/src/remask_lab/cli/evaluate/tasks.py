"""`remask eval tasks`: our own benchmarks and lm-eval's tasks under several cache policies."""

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from remask.checks.plugins import install_command
from remask.cli.options import engine_config, open_llm, sampling_option
from remask.errors import REPLACEMENTS, ConfigError, UnknownNameError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask.request.sampling_params import merge_sampling
from remask_lab.arguments import check_least, compared_policies
from remask_lab.cli.evaluate import add_draw_options
from remask_lab.cli.evaluate.likelihood import draws_of
from remask_lab.harness.benchmark import (
    PREFIX,
    benchmark,
    is_own,
    read_docs,
    read_role,
    read_shots,
    task_names,
    turns_of,
)
from remask_lab.harness.presets import TaskSettings
from remask_lab.harness.presets import task_settings as preset_settings
from remask_lab.harness.report import table
from remask_lab.harness.run import chat_tokenizer, check_first, run_local
from remask_lab.likelihood.masked import MaskDraws, MaskLikelihoods
from remask_lab.likelihood.perplexity import Policy
from remask_lab.records.jsonl import field_names
from remask_lab.records.record import Sweep, about

Measure = Callable[[str, CachePolicy], Mapping[str, Any]]
"""Measures a task under a policy: the result of a row."""


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the table, and write each row to the file of `--output`. Returns 0."""
    tasks = _tasks(args)
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise ConfigError(f"--include-path: there is no folder {args.include_path!r}")
    sampling = sampling_option(args)
    task_settings = {task: _settings(args, task, sampling) for task in tasks}
    policies, role, draws = compared_policies(args), read_role(args.system_prompt), draws_of(args)
    if args.data is not None:
        begin = _local(args, tasks[0], role, task_settings)
    else:
        begin = _harness(args, tasks, role, task_settings, draws)
    llm = open_llm(args, engine=engine_config(args), reads="chat" if any(map(is_own, tasks)) else "text")
    points: list[tuple[str, Policy, CachePolicy]] = []
    for task in tasks:
        for policy in policies:
            settings = {**task_settings[task].caches.get(policy.name, {}), **policy.settings}
            points.append((task, replace(policy, settings=settings), llm.session.policy(policy.name, settings)))
    facts = about(llm, seed=args.seed, settings=_record_settings(llm, args, sampling, role, draws))
    sweep = Sweep(args.output, "eval tasks", facts)
    measure = begin(llm)
    rows: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    for task, policy, cache_policy in points:
        if task in notes:
            continue
        point = {"task": task, "cache": policy.name, "settings": policy.settings}
        result = sweep.row(point, partial(measure, task, cache_policy))
        rows.append({**point, "result": result})
        if "seconds" not in result:
            notes[task] = f"{task} scores log-likelihoods, which use no cache, so it is measured once."
    print("\n\n".join([table(rows), *notes.values(), _summary(llm, args, sweep)]))
    return 0


def _record_settings(
    llm: LLM, args: argparse.Namespace, sampling: Mapping[str, Any], role: str, draws: MaskDraws
) -> dict[str, Any]:
    """The settings of the record; files and the system prompt by hashes of their contents."""
    return {
        "sampling": sampling,
        "preset": args.preset,
        "shots": args.shots,
        "shot_data": xxhash.xxh64(Path(args.shot_data).read_bytes()).hexdigest() if args.shot_data else None,
        "limit": args.limit,
        "system_prompt": xxhash.xxh64(role.encode()).hexdigest(),
        "data": None if args.data is None else xxhash.xxh64(Path(args.data).read_bytes()).hexdigest(),
        "fields": args.fields,
        "draws": asdict(draws),
        **({"metric": args.metric} if args.metric == "agreement" else {}),
        "engine": asdict(llm.session.engine_config),
        "lm_eval": version("lm_eval") if args.data is None else None,
    }


def _tasks(args: argparse.Namespace) -> list[str]:
    """The names of `--tasks`, each once. Raises `ConfigError` on options that do not fit them."""
    tasks = list(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    if not tasks:
        raise ConfigError(f"--tasks names none; give some, such as {PREFIX}gsm8k (--list names our own)")
    check_least(args, limit=1, shots=0)
    for task in tasks:
        if task in REPLACEMENTS:
            raise UnknownNameError("task", task, task_names())
    if args.data is not None and (len(tasks) > 1 or not is_own(tasks[0])):
        raise ConfigError(
            f"--data holds the questions of one of our own tasks ({', '.join(task_names())}); got --tasks {args.tasks}"
        )
    if args.shot_data is not None and sum(map(is_own, tasks)) > 1:
        raise ConfigError(f"--shot-data holds the examples of one of our own tasks; got --tasks {args.tasks}")
    if all(map(is_own, tasks)):
        _check_no_draws(args)
    if args.data is not None and args.include_path is not None:
        raise ConfigError("--include-path has configs for lm-eval, which --data does without; leave one of them out")
    if args.metric == "agreement" and args.data is None:
        raise ConfigError("--metric agreement is measured on local data, as lm-eval scores answers alone; give --data")
    if args.fields is not None and args.data is None:
        raise ConfigError("--fields says what the fields of --data are called; give both, or neither")
    return tasks


def _check_no_draws(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if an option of likelihoods is not at its default, as our own tasks do not score any."""
    parser = argparse.ArgumentParser()
    add_draw_options(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name != "seed" and getattr(args, name) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')} is of tasks that score likelihoods, and our own tasks generate; leave it "
                "out"
            )


def _settings(args: argparse.Namespace, task: str, sampling: Mapping[str, Any]) -> TaskSettings:
    """The settings of `task` by the preset, with `sampling` and `--shots` in place of the preset's.

    Raises `ConfigError` if only one of worked examples and their file is given.
    """
    preset = TaskSettings({}) if args.preset is None else preset_settings(args.preset, task)
    shots = preset.shots if args.shots is None else args.shots
    if is_own(task) and bool(shots) is not (args.shot_data is not None):
        raise ConfigError(
            f"{task} takes its {shots} worked examples from --shot-data FILE, a local JSONL with records like those of "
            f"its data set {benchmark(task).data}: write another split of it than is asked, or records of your own. "
            "Give both, or neither; --shots 0 asks without examples"
        )
    return replace(preset, sampling=merge_sampling(preset.sampling, sampling), shots=shots)


def _local(
    args: argparse.Namespace, task: str, role: str, settings: Mapping[str, TaskSettings]
) -> Callable[[LLM], Measure]:
    """Read the data of one of our own tasks, and return what makes its measurement on a model."""
    own_benchmark = benchmark(task)
    names = field_names("--fields", args.fields, own_benchmark.format.fields)
    docs = read_docs(own_benchmark, args.data, names, args.limit)
    count, sampling = settings[task].shots, settings[task].sampling
    shots = read_shots(own_benchmark, args.shot_data, names, count) if count else ()

    def begin(llm: LLM) -> Measure:
        """Return what measures rows on `llm`. Before the first row it checks that some questions are answered."""
        run = partial(run_local, llm, own_benchmark, docs, role=role, sampling=sampling, seed=args.seed, shots=shots)

        @cache  # once, before the first row that the file of --output does not hold
        def check() -> None:
            check_first(llm, own_benchmark, docs, role=role, sampling=sampling, seed=args.seed, shots=shots)

        def measure(_: str, policy: CachePolicy) -> Mapping[str, Any]:
            if args.metric is None:
                check()
            return run(policy=policy, losses=args.metric == "agreement")

        return measure

    return begin


def _harness(
    args: argparse.Namespace, tasks: Sequence[str], role: str, settings: Mapping[str, TaskSettings], draws: MaskDraws
) -> Callable[[LLM], Measure]:
    """Check tasks for lm-eval, and return what makes their measurement on a model.

    Raises `ConfigError` if lm-eval is not installed, and on tasks that it does not have.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"published data sets and lm-eval's tasks need lm-eval: {install_command('eval')}; "
            "our own tasks run on local data without it (--data)"
        )
    # Importing it takes seconds, and it is an extra.
    from remask_lab.harness.lm import Harness, RemaskLM

    folders = [] if args.include_path is None else [args.include_path]
    # Our own tasks take their examples from a file on any data; lm-eval takes those of its tasks from its data sets.
    examples = {
        task: turns_of(read_shots(benchmark(task), args.shot_data, None, settings[task].shots))
        for task in filter(is_own, tasks)
        if settings[task].shots
    }
    harness = Harness(own_only=all(is_own(task) for task in tasks), folders=folders)
    harness.check(tasks)

    def begin(llm: LLM) -> Measure:
        """Return what measures rows on `llm`. Raises `ConfigError` if our own tasks find no chat template."""
        estimator = MaskLikelihoods(llm, draws) if llm.loaded.config.kind == "masked" else None
        chat = llm.tokenizer is not None and llm.tokenizer.has_chat_template
        for task in filter(is_own, tasks):
            chat_tokenizer(llm, task)

        def measure(task: str, policy: CachePolicy) -> Mapping[str, Any]:
            shots = args.shots if args.preset is None else settings[task].shots
            lm = RemaskLM(llm, policy, settings[task].sampling, args.seed, estimator, examples.get(task, ()))
            return harness.run(
                lm,
                task,
                role=role if is_own(task) or args.system_prompt is not None else None,
                chat=chat,
                limit=args.limit,
                run_code=args.allow_code_execution,
                seed=args.seed,
                shots=None if is_own(task) else shots,
            )

        return measure

    return begin


def _summary(llm: LLM, args: argparse.Namespace, sweep: Sweep) -> str:
    """The model, its dtype, the seed, the file, and the number of rows that it held before."""
    file = f"; saved as {args.output}" if args.output is not None else ""
    resumed = f"; {sweep.resumed} rows were there already" if sweep.resumed else ""
    return f"{llm.loaded.name}, {str(llm.model.dtype).removeprefix('torch.')}, seed {args.seed}{file}{resumed}"
