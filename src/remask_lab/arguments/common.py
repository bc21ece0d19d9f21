"""Options that several of the laboratory's commands share, checks of such options, and the model that they open."""

import argparse
from collections.abc import Mapping, Sequence

from remask.checks.kinds import ModelKind
from remask.checks.values import whole
from remask.cli.options import object_option, open_llm
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


def separated(text: str) -> list[str]:
    """Names between commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raise `ConfigError` where an option is smaller than `least` of its name. An option that is not given passes."""
    for name, low in least.items():
        whole(f"--{name.replace('_', '-')}", getattr(args, name), low=low, optional=True)


def open_without_pool(args: argparse.Namespace) -> LLM:
    """The model for a measurement that brings memory of its own: the engine's is as small as it can be."""
    return open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0))


def compared_policies(args: argparse.Namespace, usual: Sequence[str] = ()) -> list[Policy]:
    """`--caches`, or `usual` without it, with their `--cache-config`, each once.

    Raises `ConfigError` on settings of another policy.
    """
    settings = object_option("--cache-config", args.cache_config)
    names = list(usual) if args.caches is None else separated(args.caches)
    for name, own in settings.items():
        if name not in names:
            raise ConfigError(f"--cache-config names {name!r}, which is not among --caches {','.join(names)}")
        if not isinstance(own, dict):
            raise ConfigError(f"--cache-config: {name!r} must be an object of settings, got {own!r}")
    return [Policy(name, settings.get(name, {})) for name in names]
