"""What the options of `remask_lab.cli.options` stand for: models, requests, and files of results."""

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

CUSTOM_REQUESTS = "--prompt and --input are requests of your own"
WORKLOAD_OPTIONS = ("task", "task_settings", "prefixes", "prefix_tokens", "prompt_tokens")
"""Options by which requests are drawn."""
SHAPE_OPTIONS = ("requests", "prefix_tokens", "prompt_tokens", "max_tokens", "sampling")


def split_names(text: str) -> list[str]:
    """The names in a comma-separated `text`, in order and without repetitions."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def check_least(args: argparse.Namespace, **minimums: int) -> None:
    """Raise `ConfigError` where an option is below its minimum; `minimums` are by option. None passes."""
    for option, minimum in minimums.items():
        check_whole(f"--{option.replace('_', '-')}", getattr(args, option), low=minimum, optional=True)


def check_unset(args: argparse.Namespace, reason: str, *options: str) -> None:
    """Raise `ConfigError`, whose text begins with `reason`, where one of `options` is given."""
    for option in options:
        if getattr(args, option) not in (None, False):
            raise ConfigError(f"{reason}; leave --{option.replace('_', '-')} out")


def depths_option(text: str | None, layers: int) -> list[int]:
    """Parse `--depths`: numbers of layers separated by commas, in their order.

    None gives no depths, and "all" every depth from 0 to `layers`. Raises `ConfigError` on anything else.
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
    """Open the model with the smallest possible engine, for a measurement that allocates memory of its own."""
    return open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0), reads=reads)


def compared_policies(args: argparse.Namespace) -> list[Policy]:
    """The policies of `--caches` with their settings of `--cache-config`, without repetitions.

    With `--metric agreement`, `none` comes first, as answers are compared with its answers. Raises `ConfigError` on
    settings of a policy that is not among `--caches`, and on settings that are no object.
    """
    settings = object_option("--cache-config", args.cache_config)
    names = split_names(args.caches)
    if vars(args).get("metric") == "agreement":
        names = list(dict.fromkeys(["none", *names]))
    for name, policy_settings in settings.items():
        if name not in names:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {','.join(names)}")
        if not isinstance(policy_settings, dict):
            raise ConfigError(f"--cache-config: {name!r} must be an object of settings, got {policy_settings!r}")
    return [Policy(name, settings.get(name, {})) for name in names]


def shape_settings(args: argparse.Namespace) -> dict[str, object]:
    """The options of `add_shape` for a record's settings, without the seed, for which a record has a field."""
    return {option: getattr(args, option) for option in SHAPE_OPTIONS}


def open_with_requests(args: argparse.Namespace) -> tuple[LLM, Workload]:
    """Open the model with an engine just large enough for the requests that `add_shape`'s options describe.

    Returns the model and these requests, of random tokens. A canvas of a uniform model ends with the response, unless
    the sampling parameter `canvas_length` says otherwise. Raises `ConfigError` on numbers out of range, and where the
    model has too few positions.
    """
    check_least(args, requests=1, prompt_tokens=1, max_tokens=1, prefix_tokens=0)
    defaults = {"max_tokens": args.max_tokens, "seed": args.seed, "ignore_eos": True}
    params = SamplingParams.from_mapping(merge_sampling(defaults, object_option("--sampling", args.sampling)))
    # The length of a canvas depends on the kind of model.
    llm = open_without_pool(args)
    config = llm.loaded.config
    prompt_tokens = args.prefix_tokens + args.prompt_tokens
    canvas_tokens = prompt_tokens + params.max_tokens
    stored_tokens = args.prefix_tokens
    if config.kind == "uniform":
        canvas_tokens = params.uniform.canvas_length or canvas_tokens
        params = replace(params, uniform=replace(params.uniform, canvas_length=canvas_tokens))
    if config.kind == "block_causal":
        block = params.block_length or config.block_length or 1
        canvas_tokens = -(-canvas_tokens // block) * block
        stored_tokens = args.requests * prompt_tokens
    if canvas_tokens > config.max_length:
        raise ConfigError(
            f"--prefix-tokens, --prompt-tokens and --max-tokens make {canvas_tokens} positions, and the model has "
            f"{config.max_length}; lower one of them"
        )
    llm.session.engine_config = EngineConfig(
        max_num_seqs=args.requests * (2 if params.cfg_scale > 0 else 1),
        max_model_len=canvas_tokens,
        store_budget_tokens=stored_tokens + 1,  # the store's contents must stay below its budget
    )
    llm.session.engine = llm.session.new_engine()
    return llm, random_workload(
        llm,
        requests=args.requests,
        seed=args.seed,
        sampling=params,
        prefix_tokens=args.prefix_tokens,
        prompt_tokens=args.prompt_tokens,
    )


def task_option(args: argparse.Namespace) -> TaskChoice | None:
    """The task of `--task` and `--task-settings`; None stands for the model's own. Raises what `choose_task` raises."""
    return choose_task(args.task, object_option("--task-settings", args.task_settings))


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters of `--max-tokens` and `--sampling`, which override the workload's defaults."""
    lengths = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    return merge_sampling(lengths, object_option("--sampling", args.sampling))


def check_workload_options(args: argparse.Namespace) -> TaskChoice | None:
    """Check the options of a workload before a model is opened, and return the task as `task_option` does.

    Raises `ConfigError` on numbers that are too small, sampling parameters that are not allowed, and lengths of random
    requests for a task that is not random.
    """
    task = task_option(args)
    check_least(args, requests=1, prefixes=1, prefix_tokens=0, prompt_tokens=1)
    check_sampling(sampling_options(args))
    SamplingParams.from_mapping(sampling_options(args))
    if task is not None and task.name != "random":
        _check_no_lengths(args)
    return task


def required_input(task: TaskChoice | None) -> Reads:
    """What a model must read for `task`: "chat", or "tokens" for random requests and for the model's own task."""
    return "tokens" if task is None or task.name == "random" else "chat"


def _check_no_lengths(args: argparse.Namespace) -> None:
    """Raise `ConfigError` where lengths of random requests are given, as the requests are those of a task."""
    if args.prefix_tokens is not None or args.prompt_tokens is not None:
        raise ConfigError(
            "--prefix-tokens and --prompt-tokens shape random workloads, and this model has a task; leave them out, or "
            "give --task random"
        )


def draw_workload(llm: LLM, args: argparse.Namespace) -> Workload:
    """Draw the requests of the task that `args` name, or of the model's own task.

    Raises `ConfigError` as `check_workload_options` does, and on lengths that the model's own task does not have.
    """
    task = check_workload_options(args)
    if task is None and has_own_task(llm):
        _check_no_lengths(args)
    return usual_workload(
        llm,
        args.requests,
        args.seed,
        sampling_options(args),
        prefixes=args.prefixes,
        prefix_tokens=args.prefix_tokens,
        prompt_tokens=args.prompt_tokens,
        task=task,
    )


def input_lines(args: argparse.Namespace) -> RequestFile | None:
    """The requests of `--input`; None without it. Raises `ConfigError` where the file cannot be read or holds none."""
    if args.input is None:
        return None
    lines = load_lines(args.input, forbidden_keys=("cache", "cache_config"))
    if not lines.lines:
        raise ConfigError(f"--input: {args.input!r} holds no request")
    return lines


def input_workload(llm: LLM, args: argparse.Namespace, lines: RequestFile | None) -> Workload:
    """The requests of `--input` as `input_lines` read them, or where `lines` is None the one of `--prompt`.

    A line may have the right `answer` of its request. Raises `ConfigError` on a line that makes no request.
    """
    sampling = sampling_options(args)
    if lines is None:
        tasks = [Task(build_request(llm, {"prompt": args.prompt}, "0", sampling))]
    else:
        pairs = build_requests(llm, lines, sampling, ("answer",))[: args.requests]
        tasks = [
            Task(request, _answer_text(request.id, line.get("answer")), check=says, rule=SAYS)
            for request, line in pairs
        ]
    prefixes = {tuple(task.request.prompt_token_ids[: task.request.prefix_length]) for task in tasks} - {()}
    return Workload("own prompts", seed=args.seed, tasks=tuple(tasks), prefixes=len(prefixes)).seeded


def _answer_text(request_id: str, answer: Any) -> str | None:
    """The right answer as text. Raises `ConfigError` where it is neither a text, a number nor None."""
    if not isinstance(answer, str | int | float | None) or isinstance(answer, bool):
        raise ConfigError(f"--input, request {request_id}: answer must be a text or a number, got {answer!r}")
    return None if answer is None else str(answer)


def heading(llm: LLM, workload: Workload) -> str:
    """The line above a table: the model and its requests."""
    return f"{llm.loaded.name}: {workload.name}, {len(workload.tasks)} requests over {workload.prefixes} prefixes"


def workload_settings(workload: Workload) -> dict[str, Any]:
    """The numbers and the sampling parameters of a workload, for a record's settings."""
    return {
        "name": workload.name,
        "requests": len(workload.tasks),
        "prefixes": workload.prefixes,
        "prefix_ratio": round(workload.prefix_ratio, 3),
        "sampling": merge_sampling(asdict(workload.tasks[0].request.params)),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished measurement.

    Attributes:
        about: the facts of the measurement, as `records.record.about` returns them.
        data: its numbers, which a record can hold.
        text: its numbers as text, for the terminal.
        figures: draws its pictures, by the names of their files without suffix.
    """

    about: Mapping[str, Any]
    data: Any
    text: str
    figures: Callable[[], Mapping[str, Figure]] = dict


def check_result_options(args: argparse.Namespace) -> None:
    """Raise `ConfigError` where an output option cannot be honoured, so that no long measurement is lost."""
    for name in ("output", "csv", "plots", "page"):
        check_folder(f"--{name}", vars(args).get(name))
    if vars(args).get("plots") is not None:
        check_drawing()


def save_outcome(args: argparse.Namespace, outcome: Outcome) -> None:
    """Print the outcome of `args.subject`, and write its record to `--output` and its pictures into `--plots`."""
    print(outcome.text)
    output, plots = (vars(args).get(name) for name in ("output", "plots"))
    if output is not None:
        write_record(output, Record(f"analyze {args.subject}", outcome.about, outcome.data))
        print(f"\nSaved as {output}")
    if plots is not None:
        save_pictures(lambda folder: save_figures(outcome.figures(), folder, outcome.about["model"]), plots)


def save_pictures(draw: Callable[[str], list[Path]], folder: str) -> None:
    """Call `draw` with `folder`, and print the paths of the pictures that it returns."""
    for path in draw(folder):
        print(f"Picture: {path}")
