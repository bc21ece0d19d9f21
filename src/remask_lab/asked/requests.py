"""The requests that a subject watches, as its options name them."""

import argparse
from typing import Any

from remask.cli.lines import Defaults, as_request, read_requests
from remask.cli.options import open_llm, sampling_option
from remask.engine.config import EngineConfig
from remask.engine.request import Request
from remask.llm import LLM
from remask.sampling.defaults import overlaid
from remask_lab.records.record import about


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
