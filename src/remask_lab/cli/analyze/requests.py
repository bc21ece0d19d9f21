"""What the subjects share that run requests and look on: which requests, and where the numbers go."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remask.cli.lines import Defaults, as_request, read_requests
from remask.cli.options import add_model_options, open_llm, sampling_option
from remask.engine.config import EngineConfig
from remask.engine.request import Request
from remask.llm import LLM
from remask_lab.cli.analyze.result import add_result_options, check_result_options, keep
from remask_lab.records.record import Record, about

Draw = Callable[[], list[Path]]


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Requests, sampling, output, pictures and the model."""
    add_source_options(parser)
    add_result_options(parser)
    add_model_options(parser)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Requests, and how they are sampled."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt, as plain text")
    source.add_argument("--input", metavar="FILE", help="JSONL of requests, as 'generate' takes it, without a cache")
    parser.add_argument("--sampling", metavar="JSON", help="sampling parameters; a line's own come on top")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus response, in tokens")


def open_requests(args: argparse.Namespace) -> tuple[LLM, list[Request]]:
    """The model, and the requests under `none` or what their lines say. Raises `ConfigError` on what cannot be used."""
    check_result_options(args)
    defaults = Defaults(sampling_option(args), "none", {})
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=args.max_model_len))
    if args.prompt is not None:
        return llm, [as_request(llm, {"prompt": args.prompt}, "0", defaults)]
    return llm, read_requests(llm, args.input, defaults)


def save(args: argparse.Namespace, llm: LLM, work: list[Request], data: Any, draw: Draw, **settings: Any) -> None:
    """Write the record of `data` and draw its pictures, where they are asked for, and say where they are."""
    facts: Mapping[str, Any] = {"requests": len(work), "sampling": sampling_option(args), **settings}
    keep(args, Record(f"analyze {args.subject}", about(llm, settings=facts), data), draw)
