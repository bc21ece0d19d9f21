"""Options that say which requests a subject watches, and those requests."""

import argparse
from typing import Any

from remask.cli.lines import Defaults, as_request, read_requests
from remask.cli.options import add_model_options, open_llm, sampling_option
from remask.engine.config import EngineConfig
from remask.engine.request import Request
from remask.llm import LLM
from remask.sampling.defaults import overlaid
from remask_lab.arguments.results import add_result_options
from remask_lab.records.record import about


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for requests, sampling, the result and the model."""
    add_source_options(parser)
    add_result_options(parser)
    add_model_options(parser)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for requests and how they are sampled."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt, as plain text")
    source.add_argument("--input", metavar="FILE", help="JSONL of requests, as 'generate' takes it, without a cache")
    parser.add_argument(
        "--sampling",
        metavar="JSON",
        help="sampling parameters, on top of the model's own; a line's come on top of these",
    )
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus response, in tokens")


def open_requests(args: argparse.Namespace) -> tuple[LLM, list[Request]]:
    """Open the model and read the requests, each under `none` or what its line says.

    Raises `ConfigError` on what cannot be used.
    """
    defaults = Defaults(sampling_option(args), "none", {})
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=args.max_model_len))
    if args.prompt is not None:
        return llm, [as_request(llm, {"prompt": args.prompt}, "0", defaults)]
    return llm, read_requests(llm, args.input, defaults)


def about_requests(args: argparse.Namespace, llm: LLM, requests: list[Request], **settings: Any) -> dict[str, Any]:
    """What a record says of requests that `open_requests` read: how many, their sampling, and `settings`."""
    return about(
        llm, settings={"requests": len(requests), "sampling": overlaid(llm.sampling, sampling_option(args)), **settings}
    )
