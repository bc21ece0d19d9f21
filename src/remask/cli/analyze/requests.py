"""What the subjects share that run requests and look on: which requests, and where the numbers go."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remask.cli.lines import Defaults, as_work, read_work
from remask.cli.options import add_model_options, check_folder, open_llm, sampling_option
from remask.engine.config import EngineConfig
from remask.evals.record import Record, about, write_record
from remask.llm import LLM, Work

Draw = Callable[[], list[Path]]


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Requests, sampling, output, pictures and the model."""
    add_source_options(parser)
    parser.add_argument("--output", metavar="FILE", help="where the numbers go, as JSON")
    parser.add_argument("--plots", metavar="FOLDER", help="where pictures go; made if it is not there")
    add_model_options(parser)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Requests, and how they are sampled."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt, as plain text")
    source.add_argument("--input", metavar="FILE", help="JSONL of requests, as 'generate' takes it, without a cache")
    parser.add_argument("--sampling", metavar="JSON", help="sampling parameters; a line's own come on top")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus response, in tokens")


def open_requests(args: argparse.Namespace) -> tuple[LLM, list[Work]]:
    """The model, and the requests under `none` or what their lines say. Raises `ConfigError` on what cannot be used."""
    check_folder("--output", args.output)
    check_folder("--plots", args.plots)
    defaults = Defaults(sampling_option(args), "none", {})
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=args.max_model_len))
    if args.prompt is not None:
        return llm, [as_work(llm, {"prompt": args.prompt}, "0", defaults)]
    return llm, read_work(llm, args.input, defaults)


def save(args: argparse.Namespace, llm: LLM, work: list[Work], data: Any, draw: Draw, **settings: Any) -> None:
    """Write the record of `data` and draw its pictures, where they are asked for, and say where they are."""
    if args.output is not None:
        facts: Mapping[str, Any] = {"requests": len(work), "sampling": sampling_option(args), **settings}
        write_record(args.output, Record(f"analyze {args.subject}", about(llm, settings=facts), data))
        print(f"\nSaved as {args.output}")
    if args.plots is not None:
        for path in draw():
            print(f"Picture: {path}")
