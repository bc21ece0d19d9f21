"""Options that several commands share, and how they become a model."""

import argparse
from pathlib import Path
from typing import Any

from remask.core.checks import json_object
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.models.source import BUNDLED_SAMPLING
from remask.store.eviction import EVICTIONS
from remask.store.prefix_index import PREFIX_MATCHES

_DEFAULTS = EngineConfig()


def add_model_options(parser: argparse.ArgumentParser, model: str | None = None) -> None:
    """`--model`, `--dtype` and what else says which weights run where; `model` is the default, if there is one."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=model,
        required=model is None,
        help="folder or hub id of a checkpoint, 'bundled', 'bundled-uniform', or with --load-format dummy a preset"
        + (f" (default {model})" if model else ""),
    )
    group.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default auto)")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default auto)")
    group.add_argument("--depth-table", metavar="FILE", help="depth table written by 'remask profile'")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Limits of the engine."""
    group = parser.add_argument_group("engine")
    group.add_argument("--max-num-seqs", type=int, default=_DEFAULTS.max_num_seqs, help="requests run at a time")
    group.add_argument("--max-model-len", type=int, help="longest prompt plus response, in tokens")
    group.add_argument("--max-row-layers", type=int, help="row-layers that one step may compute")
    group.add_argument("--max-refreshes", type=int, help="requests that may refresh in one step")
    group.add_argument("--page-size", type=int, help="token slots a page (default 16, or whole blocks)")
    group.add_argument(
        "--store-budget-tokens",
        type=int,
        default=_DEFAULTS.store_budget_tokens,
        help="tokens the prefix store may hold",
    )
    group.add_argument("--eviction", default=_DEFAULTS.eviction, metavar="|".join(EVICTIONS), help="of stored prefixes")
    group.add_argument(
        "--prefix-match",
        default=_DEFAULTS.prefix_match,
        metavar="|".join(PREFIX_MATCHES),
        help="longest: read the longest stored part of a shared prefix that is not stored (default exact)",
    )
    group.add_argument(
        "--prefix-cover",
        type=float,
        default=_DEFAULTS.prefix_cover,
        help=f"share of a shared prefix that such a part must cover (default {_DEFAULTS.prefix_cover})",
    )
    add_batch_invariant(group)


def add_batch_invariant(group: argparse._ActionsContainer) -> None:
    """`--batch-invariant`, for commands that take it without the other limits of the engine."""
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="answers do not depend on what else runs, bit for bit; slower",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's limits as given."""
    return EngineConfig(
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_row_layers=args.max_row_layers,
        max_refreshes=args.max_refreshes,
        page_size=args.page_size,
        store_budget_tokens=args.store_budget_tokens,
        eviction=args.eviction,
        prefix_match=args.prefix_match,
        prefix_cover=args.prefix_cover,
        batch_invariant=args.batch_invariant,
    )


def open_llm(
    args: argparse.Namespace,
    cache: str = "none",
    cache_config: dict[str, Any] | None = None,
    engine: EngineConfig | None = None,
) -> LLM:
    """The model that the options name. Raises what `LLM` raises."""
    return LLM(
        args.model,
        cache=cache,
        cache_config=cache_config,
        dtype=args.dtype,
        device=args.device,
        load_format=args.load_format,
        depth_table=args.depth_table,
        engine=engine,
        progress=not args.quiet,
    )


def check_folder(option: str, path: str | None) -> None:
    """Raise `ConfigError` where `path` cannot hold a file: a long measurement must not end in one."""
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {str(Path(path).parent)!r}; make it, or name another file")


def object_option(option: str, text: str | None) -> dict[str, Any]:
    """The JSON object given to `option`; empty without one. Raises `ConfigError` on anything else."""
    return {} if text is None else json_object(option, text)


def sampling_option(args: argparse.Namespace) -> dict[str, Any]:
    """`--sampling`; the bundled models answer as they were trained to without one."""
    if args.sampling is None and args.model in BUNDLED_SAMPLING:
        return dict(BUNDLED_SAMPLING[args.model])
    return object_option("--sampling", args.sampling)
