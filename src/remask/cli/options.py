"""Options that several commands share, and the model that they name."""

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from remask.checkpoint.source import BUNDLED_MODELS
from remask.checks.values import json_object
from remask.engine.config import DEFAULT_UTILIZATION, EngineConfig
from remask.errors import ConfigError
from remask.llm import AUTO, LLM
from remask.model.attention_names import ATTENTIONS
from remask.model.quantised import QUANTIZATIONS
from remask.policies import parse
from remask.policies.depth_lookup import DepthLookup
from remask.request.sampling_params import SamplingParams
from remask.store.eviction import EVICTIONS
from remask.store.prefix_index import PREFIX_MATCHES, PREFIX_SHARINGS

_DEFAULTS = EngineConfig()
# Options of any command that name files to be read, and cache policies, which these words stand for too.
_READ, _POLICIES, _ANY = ("input", "prompts", "depth_table"), ("cache", "caches"), ("all", "auto")


def add_model_options(parser: argparse.ArgumentParser, model: str | None = None) -> None:
    """Add `--model`, `--dtype` and the other options that choose weights and device. `model` is the default."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=model,
        required=model is None,
        help=f"folder, GGUF file, hub id or ID:FILE.gguf of a checkpoint, "
        f"{', '.join(map(repr, BUNDLED_MODELS))}, or with --load-format dummy "
        "a preset" + (f" (default {model})" if model else ""),
    )
    group.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights")
    group.add_argument(
        "--skip-weight-check", action="store_true", help="load a checkpoint that holds NaN or infinities"
    )
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default auto)")
    group.add_argument(
        "--quantization",
        metavar="|".join(QUANTIZATIONS),
        help="quantize the weights: int8 or int4 on CPUs, fp8 on CUDA devices that have it",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default auto)")
    group.add_argument("--depth-table", metavar="FILE", help="depth table written by 'remask profile'")
    add_threads_option(group)


def add_threads_option(group: argparse._ActionsContainer) -> None:
    """`--threads`, for commands that take it without the other options of the model."""
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads to compute on (default: by the model's size and the cores that are free)",
    )


def add_tensor_parallel(parser: argparse.ArgumentParser) -> None:
    """`--tensor-parallel`, for commands that read nothing of the model but its answers."""
    parser.add_argument(
        "--tensor-parallel",
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="processes that compute the model together, on N devices from --device on (default 1)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit the engine."""
    group = parser.add_argument_group("engine")
    group.add_argument("--max-num-seqs", type=int, default=_DEFAULTS.max_num_seqs, help="requests run at a time")
    group.add_argument("--max-model-len", type=int, help="longest prompt plus response, in tokens")
    group.add_argument("--max-row-layers", type=int, help="row-layers that one step may compute")
    group.add_argument(
        "--max-client-row-layers",
        type=int,
        help="row-layers of one step that a client may have beside others (default those of the longest canvas)",
    )
    group.add_argument("--max-refreshes", type=int, help="requests that may refresh in one step")
    group.add_argument("--max-steps", type=int, help="steps that a request may ask for (default 4 x --max-model-len)")
    group.add_argument(
        "--max-stop",
        type=int,
        default=_DEFAULTS.max_stop,
        help=f"stop texts that a request may name (default {_DEFAULTS.max_stop})",
    )
    group.add_argument(
        "--max-stop-chars",
        type=int,
        default=_DEFAULTS.max_stop_chars,
        help=f"characters of a stop text (default {_DEFAULTS.max_stop_chars})",
    )
    group.add_argument("--max-request-row-layers", type=int, help="row-layers that a request may cause in all")
    group.add_argument("--page-size", type=int, help="token slots a page (default 16, or whole blocks)")
    group.add_argument(
        "--store-budget-tokens",
        type=tokens_or_auto,
        default=_DEFAULTS.store_budget_tokens,
        metavar="N|auto",
        help=f"tokens the prefix store may hold (default {_DEFAULTS.store_budget_tokens}; auto: on CUDA what has room)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help=f"share of a CUDA device's memory that may be taken (default {DEFAULT_UTILIZATION})",
    )
    group.add_argument("--eviction", default=_DEFAULTS.eviction, metavar="|".join(EVICTIONS), help="order of eviction")
    group.add_argument(
        "--prefix-sharing",
        default=_DEFAULTS.prefix_sharing,
        metavar="|".join(PREFIX_SHARINGS),
        help="auto: where a request does not say what is shared, share what recent prompts begin with (default exact)",
    )
    group.add_argument(
        "--prefix-min",
        type=int,
        default=_DEFAULTS.prefix_min,
        metavar="TOKENS",
        help=f"shortest part that auto shares (default {_DEFAULTS.prefix_min})",
    )
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
    group.add_argument(
        "--attention",
        default=_DEFAULTS.attention,
        metavar="|".join(ATTENTIONS),
        help=f"what computes attention (default {_DEFAULTS.attention}: triton on CUDA, torch elsewhere)",
    )
    group.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.overlap,
        help="queue a pass before the one before it is read; answers are the same (default: where proven)",
    )
    group.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULTS.graphs,
        help="repeat layers as device graphs, which saves launches on a GPU (default: where proven)",
    )


def tokens_or_auto(text: str) -> int | str:
    """A number of tokens, or "auto"."""
    return text if text == AUTO else int(text)


def add_batch_invariant(group: argparse._ActionsContainer) -> None:
    """`--batch-invariant`, for commands that take it without the other limits of the engine."""
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="answers do not depend on what else runs, bit for bit; slower",
    )


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
    cache: str = "none",
    cache_config: dict[str, Any] | None = None,
    engine: EngineConfig | None = None,
    spare_cores: int = 0,
) -> LLM:
    """Load the model that the options name. Raises what `LLM` raises.

    Files and cache policies that the options name are looked for first, as reading weights may take minutes.
    """
    for option in _READ:
        check_file(f"--{option.replace('_', '-')}", getattr(args, option, None))
    for option in _POLICIES:
        check_policies(getattr(args, option, None))
    return LLM(
        args.model,
        cache=cache,
        cache_config=cache_config,
        engine=engine,
        progress=not args.quiet,
        spare_cores=spare_cores,
        **model_settings(args),
    )


def check_file(option: str, path: str | None) -> None:
    """Raise `ConfigError` if there is no file, pipe or device `path` to be read; "-" is standard input."""
    if path is not None and path != "-" and (not os.path.exists(path) or os.path.isdir(path)):
        raise ConfigError(f"{option}: there is no file {path!r}; check the name and the folder")


def check_policies(specs: str | None) -> None:
    """Raise `ConfigError` if one of the `specs`, separated by commas, names no cache policy or no composition."""
    for spec in [] if specs is None else specs.split(","):
        if spec.strip() not in _ANY:
            parse(spec.strip(), None, lambda: DepthLookup({}))


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
