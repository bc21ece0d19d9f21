"""What the options of `remask_lab.cli.options` come to: models, requests, and where results go."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remask.checkpoint.settings import Reads
from remask.checks.values import check_whole
from remask.cli.lines import RequestFile, build_request, build_requests, load_lines
from remask.cli.options import check_folder, object_option, open_llm
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams, merge_sampling
from remask.request.terms import check_sampling
from remask_lab.bench.workload import (
    SAYS,
    Task,
    TaskChoice,
    Workload,
    choose_task,
    has_own_task,
    random_workload,
    says,
    usual_workload,
)
from remask_lab.drawing import check_drawing, save_figures
from remask_lab.likelihood.perplexity import Policy
from remask_lab.records.record import Record, write_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN = "--prompt and --input are requests of your own"
DRAWN = ("task", "task_settings", "prefixes", "prefix_tokens", "prompt_tokens")
"""Options by which requests are drawn."""
SHAPE = ("requests", "prefix_tokens", "prompt_tokens", "max_tokens", "sampling")


def separated(text: str) -> list[str]:
    """Names between commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raise `ConfigError` where an option is smaller than `least` of its name. An option that is not given passes."""
    for name, low in least.items():
        check_whole(f"--{name.replace('_', '-')}", getattr(args, name), low=low, optional=True)


def check_unset(args: argparse.Namespace, why: str, *names: str) -> None:
    """Raise `ConfigError`, which says `why`, where one of the options `names` is given."""
    for name in names:
        if getattr(args, name) not in (None, False):
            raise ConfigError(f"{why}; leave --{name.replace('_', '-')} out")


def depths_option(text: str | None, layers: int) -> list[int]:
    """The depths that `--depths` names, in its order; none without it, and "all" of a model of so many layers.

    Raises `ConfigError` on what is no list of numbers.
    """
    if text is None:
        return []
    if text == "all":
        return list(range(layers + 1))
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--depths must be numbers of layers separated by commas, or 'all'; got {text!r}") from error


def open_without_pool(args: argparse.Namespace, reads: Reads = "tokens") -> LLM:
    """The model for a measurement that brings memory of its own: the engine's is as small as it can be."""
    return open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0), reads=reads)


def compared_policies(args: argparse.Namespace) -> list[Policy]:
    """`--caches` with their `--cache-config`, each once.

    `none` comes before them under `--metric agreement`, of commands that have it: answers are compared with its. Raises
    `ConfigError` on settings of another policy.
    """
    settings = object_option("--cache-config", args.cache_config)
    names = separated(args.caches)
    if vars(args).get("metric") == "agreement":
        names = list(dict.fromkeys(["none", *names]))
    for name, own in settings.items():
        if name not in names:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {','.join(names)}")
        if not isinstance(own, dict):
            raise ConfigError(f"--cache-config: {name!r} must be an object of settings, got {own!r}")
    return [Policy(name, settings.get(name, {})) for name in names]


def shape_settings(args: argparse.Namespace) -> dict[str, object]:
    """The options of `add_shape` as a record has them; the seed has a field of its own there."""
    return {name: getattr(args, name) for name in SHAPE}


def open_with_requests(args: argparse.Namespace) -> tuple[LLM, Workload]:
    """The model, its engine with room for requests of the asked shape and no more, and these.

    A uniform model's canvas ends with the response, unless `canvas_length` says otherwise. Raises `ConfigError` on
    numbers out of range, and where the model has too few positions.
    """
    check_least(args, requests=1, prompt_tokens=1, max_tokens=1, prefix_tokens=0)
    own = {"max_tokens": args.max_tokens, "seed": args.seed, "ignore_eos": True}
    params = SamplingParams.from_mapping(merge_sampling(own, object_option("--sampling", args.sampling)))
    # How long canvases are depends on the kind of model.
    llm = open_without_pool(args)
    config, prompt = llm.loaded.config, args.prefix_tokens + args.prompt_tokens
    length, stored = prompt + params.max_tokens, args.prefix_tokens
    if config.kind == "uniform":
        length = params.uniform.canvas_length or length
        params = replace(params, uniform=replace(params.uniform, canvas_length=length))
    if config.kind == "block_causal":
        block = params.block_length or config.block_length or 1
        length, stored = -(-length // block) * block, args.requests * prompt
    if length > config.max_length:
        raise ConfigError(
            f"--prefix-tokens, --prompt-tokens and --max-tokens make {length} positions, and the model has "
            f"{config.max_length}; lower one of them"
        )
    llm.session.engine_config = EngineConfig(
        max_num_seqs=args.requests * (2 if params.cfg_scale > 0 else 1),
        max_model_len=length,
        store_budget_tokens=stored + 1,  # what the store takes is smaller than its budget
    )
    llm.session.engine = llm.session.new_engine()
    return llm, random_workload(llm, args.requests, 1, args.seed, params, args.prefix_tokens, args.prompt_tokens)


def asked_task(args: argparse.Namespace) -> TaskChoice | None:
    """The task that the options name; None: the model's own. Raises what `choose_task` raises."""
    return choose_task(args.task, object_option("--task-settings", args.task_settings))


def asked_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters as given, which come on top of the workload's usual ones."""
    lengths = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    return merge_sampling(lengths, object_option("--sampling", args.sampling))


def check_workload_options(args: argparse.Namespace) -> TaskChoice | None:
    """The task that the options name; None: the model's own.

    Raises `ConfigError` on what no model can change: numbers that are too small, sampling parameters that are not
    allowed, and shapes that the task does not have.
    """
    task = asked_task(args)
    check_least(args, requests=1, prefixes=1, prefix_tokens=0, prompt_tokens=1)
    check_sampling(asked_sampling(args))
    SamplingParams.from_mapping(asked_sampling(args))
    if task is not None and task.name != "random":
        _check_unshaped(args)
    return task


def read_by(task: TaskChoice | None) -> Reads:
    """What a model reads that is asked `task`; its own task suits it, whatever it reads."""
    return "tokens" if task is None or task.name == "random" else "chat"


def _check_unshaped(args: argparse.Namespace) -> None:
    if args.prefix_tokens is not None or args.prompt_tokens is not None:
        raise ConfigError(
            "--prefix-tokens and --prompt-tokens shape random workloads, and this model has a task; leave them out, or "
            "give --task random"
        )


def asked_workload(llm: LLM, args: argparse.Namespace) -> Workload:
    """The task that `args` name, or the model's own, as `args` shape it.

    Raises `ConfigError` as `check_workload_options`, and on shapes that the model's own task does not have.
    """
    task = check_workload_options(args)
    if task is None and has_own_task(llm):
        _check_unshaped(args)
    return usual_workload(
        llm,
        args.requests,
        args.seed,
        asked_sampling(args),
        prefixes=args.prefixes,
        prefix_tokens=args.prefix_tokens,
        prompt_tokens=args.prompt_tokens,
        task=task,
    )


def own_lines(args: argparse.Namespace) -> RequestFile | None:
    """The lines of `--input`, if it is given. Raises `ConfigError` where they cannot be read, or there are none."""
    if args.input is None:
        return None
    lines = load_lines(args.input, forbidden_keys=("cache", "cache_config"))
    if not lines.lines:
        raise ConfigError(f"--input: {args.input!r} holds no request")
    return lines


def own_workload(llm: LLM, args: argparse.Namespace, lines: RequestFile | None) -> Workload:
    """The request of `--prompt`, or those of `--input`, each with the `answer` that its line may carry.

    Raises `ConfigError` on what cannot be used.
    """
    sampling = asked_sampling(args)
    if lines is None:
        tasks = [Task(build_request(llm, {"prompt": args.prompt}, "0", sampling))]
    else:
        found = build_requests(llm, lines, sampling, ("answer",))[: args.requests]
        tasks = [
            Task(request, _right(request.id, line.get("answer")), check=says, rule=SAYS) for request, line in found
        ]
    shared = {tuple(each.request.prompt_token_ids[: each.request.prefix_length]) for each in tasks} - {()}
    return Workload("own prompts", args.seed, tuple(tasks), len(shared)).seeded


def _right(name: str, answer: Any) -> str | None:
    if not isinstance(answer, str | int | float | None) or isinstance(answer, bool):
        raise ConfigError(f"--input, request {name}: answer must be a text or a number, got {answer!r}")
    return None if answer is None else str(answer)


def heading(llm: LLM, workload: Workload) -> str:
    """The line above a table: the model and its requests."""
    return f"{llm.loaded.name}: {workload.name}, {len(workload.tasks)} requests over {workload.prefixes} prefixes"


def described(workload: Workload) -> dict[str, Any]:
    """What was asked, for a record's settings."""
    return {
        "name": workload.name,
        "requests": len(workload.tasks),
        "prefixes": workload.prefixes,
        "prefix_ratio": round(workload.prefix_ratio, 3),
        "sampling": merge_sampling(asdict(workload.tasks[0].request.params)),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished measurement: what a record says `about` it, its numbers, and a `text` for people.

    `figures` draws the pictures, by the names of their files.
    """

    about: Mapping[str, Any]
    data: Any
    text: str
    figures: Callable[[], Mapping[str, Figure]] = dict


def check_result_options(args: argparse.Namespace) -> None:
    """Raise `ConfigError` where the result could not be kept: a long measurement must not end in that."""
    for name in ("output", "csv", "plots", "page"):
        check_folder(f"--{name}", vars(args).get(name))
    if vars(args).get("plots") is not None:
        check_drawing()


def keep(args: argparse.Namespace, outcome: Outcome) -> None:
    """Print the outcome of `args.subject`, and write its record and pictures as far as they are asked for."""
    print(outcome.text)
    output, plots = (vars(args).get(name) for name in ("output", "plots"))
    if output is not None:
        write_record(output, Record(f"analyze {args.subject}", outcome.about, outcome.data))
        print(f"\nSaved as {output}")
    if plots is not None:
        keep_pictures(lambda folder: save_figures(outcome.figures(), folder, outcome.about["model"]), plots)


def keep_pictures(draw: Callable[[str], list[Path]], folder: str) -> None:
    """Let `draw` write its pictures into the folder, and name them."""
    for path in draw(folder):
        print(f"Picture: {path}")
