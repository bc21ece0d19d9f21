"""Requests of random tokens and of one shape, and the model that runs them, as options say."""

import argparse
from dataclasses import replace

from remask.cli.options import object_option
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.arguments.common import check_least
from remask_lab.asked.common import open_without_pool
from remask_lab.bench.workload import Workload, random_workload

SETTINGS = ("requests", "prefix_tokens", "prompt_tokens", "max_tokens", "sampling")


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """The options of `add_shape_options` as a record has them; the seed has a field of its own there."""
    return {name: getattr(args, name) for name in SETTINGS}


def open_with_requests(args: argparse.Namespace) -> tuple[LLM, Workload]:
    """The model, its engine with room for the requests and no more, and these.

    A uniform model's canvas ends with the response, unless `canvas_length` says otherwise. Raises `ConfigError` on
    numbers out of range, and where the model has too few positions.
    """
    check_least(args, requests=1, prompt_tokens=1, max_tokens=1, prefix_tokens=0)
    own = {"max_tokens": args.max_tokens, "seed": args.seed, "ignore_eos": True}
    params = SamplingParams.from_mapping({**own, **object_option("--sampling", args.sampling)})
    # How long canvases are depends on the kind of model.
    llm = open_without_pool(args)
    config, prompt = llm.loaded.config, args.prefix_tokens + args.prompt_tokens
    length, stored = prompt + params.max_tokens, args.prefix_tokens
    if config.kind == "uniform":
        length = params.canvas_length or length
        params = replace(params, canvas_length=length)
    if config.kind == "block_causal":
        block = params.block_length or config.block_length or 1
        length, stored = -(-length // block) * block, args.requests * prompt
    if length > config.max_length:
        raise ConfigError(
            f"--prefix-tokens, --prompt-tokens and --max-tokens make {length} positions, and the model has "
            f"{config.max_length}; lower one of them"
        )
    llm.engine_config = EngineConfig(
        max_num_seqs=args.requests * (2 if params.cfg_scale > 0 else 1),
        max_model_len=length,
        store_budget_tokens=stored + 1,  # what the store takes is smaller than its budget
    )
    llm.engine = llm.new_engine()
    return llm, random_workload(llm, args.requests, 1, args.seed, params, args.prefix_tokens, args.prompt_tokens)
