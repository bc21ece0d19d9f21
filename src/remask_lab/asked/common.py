"""The model and the policies that options shared by several commands come to."""

import argparse
from collections.abc import Sequence

from remask.cli.options import object_option, open_llm
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.arguments.common import separated
from remask_lab.likelihood.perplexity import Policy


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
