"""`remask demo`: a bundled model answers the questions of its task under several cache policies."""

import argparse
from pathlib import Path

from remask.cli.options import add_threads_option, open_llm
from remask.core.sampling import SamplingParams
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.models.source import BUNDLED, BUNDLED_UNIFORM
from remask_lab.arguments.common import COMPARED_CACHES
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender
from remask_lab.bench.report import table
from remask_lab.bench.workload import (
    TIMETABLE_SAMPLING,
    TRANSIT_SAMPLING,
    Workload,
    bundled_workload,
    timetable_workload,
)
from remask_lab.depth_plot import plot_depth
from remask_lab.drawing import check_drawing

PICTURE = "out/depth.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "No caching, all-layer reuse and BiCache on requests that share a system prompt; with --uniform no "
        "caching, block-prefix and uniform-cache on a model of uniform diffusion."
    )
    parser.add_argument("--uniform", action="store_true", help="run the bundled uniform model and its caches")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="questions (default 64)")
    parser.add_argument("--picture", metavar="FILE", help=f"file of the picture of b(r) (default {PICTURE})")
    parser.add_argument("--seed", type=int, default=7, help="seed of the questions")
    add_threads_option(parser)
    parser.set_defaults(dtype="float32", device="auto", load_format="auto", depth_table=None, skip_weight_check=False)


def run(args: argparse.Namespace) -> int:
    """Show one answer and the table, and draw the picture for the masked model."""
    if args.uniform and args.picture is not None:
        raise ConfigError("--picture shows depths of shared prefixes, which uniform models do not have; leave it out")
    if not args.uniform:
        check_drawing()
    args.model = BUNDLED_UNIFORM if args.uniform else BUNDLED
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=8))
    if args.uniform:
        params = SamplingParams.from_mapping(TIMETABLE_SAMPLING)
        workload = timetable_workload(llm, args.requests, args.seed, params)
        _show_timetable(llm, workload)
        _compare(llm, workload, args)
        return 0
    workload = bundled_workload(llm, args.requests, 4, args.seed, SamplingParams.from_mapping(TRANSIT_SAMPLING))
    _show_ride(llm, workload)
    _compare(llm, workload, args)
    picture = Path(args.picture or PICTURE)
    picture.parent.mkdir(parents=True, exist_ok=True)
    print("\nHow deep a shared prefix may be reused, by prefix ratio:", end=" ", flush=True)
    plot_depth(llm.depth_table, picture)
    print(picture)
    return 0


def _compare(llm: LLM, workload: Workload, args: argparse.Namespace) -> None:
    contenders = [Contender(name, llm.policy(name)) for name in COMPARED_CACHES[llm.loaded.config.kind]]
    print(table(run_bench(llm, workload, contenders, 1, llm.engine_config, not args.quiet)))


def _answer(llm: LLM, workload: Workload, cache: str) -> tuple[str, Output]:
    """Returns the prompt of the first request without its shared prefix, and the answer under `cache`."""
    request = workload.tasks[0].request
    (output,) = llm.run([request.with_policy(llm.policy(cache))], progress=False)
    assert llm.tokenizer is not None
    return " ".join(llm.tokenizer.decode(request.prompt_token_ids[request.prefix_length :]).split()), output


def _show_ride(llm: LLM, workload: Workload) -> None:
    task = workload.tasks[0]
    prompt, output = _answer(llm, workload, "bicache")
    print(f"{task.request.prefix_length} shared tokens: a table of next stops, then the user's turn:")
    print(f"  {prompt}\n  -> {output.text}   (right answer: {task.answer})\n")


def _show_timetable(llm: LLM, workload: Workload) -> None:
    task = workload.tasks[0]
    prompt, output = _answer(llm, workload, "uniform-cache")
    print("A timetable, by uniform diffusion: the response begins as noise, and any token of a block may change.")
    print(f"  {prompt}\n  -> {output.text}   ({'right' if task.correct(output.text) else f'right: {task.answer}'})\n")
