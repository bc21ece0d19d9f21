"""Options that several of the laboratory's commands share, checks of such options, and the model that they open."""

import argparse
from collections.abc import Mapping

from remask.cli.options import object_option, open_llm
from remask.core.kinds import ModelKind
from remask.depth.profile import ProfileSettings
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.likelihood.perplexity import Policy

COMPARED_CACHES: Mapping[ModelKind, tuple[str, ...]] = {
    "masked": ("none", "reuse", "bicache"),
    "block_causal": ("none", "exact"),
    "uniform": ("none", "block-prefix", "uniform-cache"),
}


def tau_option(parser: argparse.ArgumentParser) -> None:
    """`--tau`, a share between 0 and 1."""
    default = ProfileSettings().tau
    parser.add_argument(
        "--tau", type=float, default=default, help=f"similarity that a layer must exceed (default {default})"
    )


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raise `ConfigError` where an option is smaller than `least` of its name. An option that is not given passes."""
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


def open_without_pool(args: argparse.Namespace) -> LLM:
    """The model for a measurement that brings memory of its own: the engine's is as small as it can be."""
    return open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0))


def compared_policies(args: argparse.Namespace) -> list[Policy]:
    """`--caches` with their `--cache-config`, each once. Raises `ConfigError` on settings of another policy."""
    settings = object_option("--cache-config", args.cache_config)
    names = list(dict.fromkeys(name.strip() for name in args.caches.split(",")))
    for name, own in settings.items():
        if name not in names:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {args.caches}")
        if not isinstance(own, dict):
            raise ConfigError(f"--cache-config: {name!r} must be an object of settings, got {own!r}")
    return [Policy(name, settings.get(name, {})) for name in names]
