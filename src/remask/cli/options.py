"""What the options that several commands share come to: the engine's limits, the model, and objects of JSON."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from remask.checks.values import json_object
from remask.cli.banner import show_banner
from remask.cli.policy_file import policy_option
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask.request.sampling_params import SamplingParams


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's limits as the options give them."""
    return EngineConfig(**{each.name: getattr(args, each.name) for each in fields(EngineConfig)})


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `LLM` that say how the model is loaded."""
    return {
        "dtype": args.dtype,
        "device": args.device,
        "load_format": args.load_format,
        "check_weights": not args.skip_weight_check,
        "depth_table": args.depth_table,
        "threads": args.threads,
        "quantization": getattr(args, "quantization", None),
        "tensor_parallel": getattr(args, "tensor_parallel", 1),
    }


def open_llm(
    args: argparse.Namespace,
    cache: str | CachePolicy = "none",
    cache_config: dict[str, Any] | None = None,
    engine: EngineConfig | None = None,
) -> LLM:
    """Load the model that the options name, and show the command's banner. Raises what `LLM` raises."""
    llm = load_llm(args, cache, cache_config, engine)
    if args.banner is not None:
        where, then = args.banner
        show_banner(args, llm, where, then.format(model=args.model))
    return llm


def load_llm(
    args: argparse.Namespace,
    cache: str | CachePolicy = "none",
    cache_config: dict[str, Any] | None = None,
    engine: EngineConfig | None = None,
    spare_cores: int = 0,
) -> LLM:
    """Load the model that the options name, and a policy that is in a file. Raises what `LLM` raises."""
    policy, settings = policy_option(cache, cache_config)
    return LLM(
        args.model,
        cache=policy,
        cache_config=settings,
        engine=engine,
        progress=args.progress,
        spare_cores=spare_cores,
        **model_settings(args),
    )


def check_folder(option: str, path: str | None) -> None:
    """Raise `ConfigError` if the folder of `path` does not exist, before a long measurement fails to write there."""
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {str(Path(path).parent)!r}; make it, or name another file")


def object_option(option: str, text: str | None) -> dict[str, Any]:
    """Return the JSON object given to `option`, or an empty one. Raises `ConfigError` on anything else."""
    return {} if text is None else json_object(option, text)


def sampling_option(args: argparse.Namespace) -> dict[str, Any]:
    """Return `--sampling`, which comes on top of the model's own defaults. Raises `ConfigError` on bad parameters."""
    sampling = object_option("--sampling", args.sampling)
    SamplingParams.from_mapping(sampling)
    return sampling
