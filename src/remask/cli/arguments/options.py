"""Options that several commands share: the model, its device, and the limits of the engine."""

import argparse

from remask.checkpoint.bundled import BUNDLED_MODELS
from remask.cli.early import check_named
from remask.engine.config import AUTO, DEFAULT_UTILIZATION, EngineConfig
from remask.model.attention_names import ATTENTIONS
from remask.model.quantization_names import QUANTIZATIONS
from remask.store.eviction import EVICTIONS
from remask.store.prefix_names import PREFIX_MATCHES, PREFIX_SHARINGS

_DEFAULTS = EngineConfig()


def add_model_options(parser: argparse.ArgumentParser, model: str | None = None, *, depths: bool = True) -> None:
    """Add `--model`, `--dtype` and the other options that choose weights and device.

    `model` is the default. `depths` says whether the command may run a policy that looks a depth up.
    """
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=model,
        required=model is None,
        help=f"folder, GGUF file, hub id or ID:FILE.gguf of a checkpoint, "
        f"{', '.join(map(repr, BUNDLED_MODELS))}, or with --load-format dummy "
        "a preset" + (f" (default {model})" if model else ""),
    )
    group.add_argument(
        "--load-format",
        default="auto",
        choices=("auto", "dummy"),
        help="dummy: random weights of a preset's shape, without a tokenizer; remask serve reads texts as bytes",
    )
    group.add_argument(
        "--skip-weight-check", action="store_true", help="load a checkpoint that holds NaN or infinities"
    )
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default auto)")
    group.add_argument(
        "--quantization",
        choices=("auto", *QUANTIZATIONS),
        metavar="|".join(("auto", *QUANTIZATIONS)),
        help="quantize the weights: int8 or int4 on CPUs, fp8 on CUDA devices that have it; auto: the fastest that "
        "fits on a CPU",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default auto)")
    if depths:
        group.add_argument("--depth-table", metavar="FILE", help="depth table written by 'remask profile'")
    else:
        parser.set_defaults(depth_table=None)
    add_threads_option(group)
    parser.set_defaults(early=check_named)


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
    group.add_argument("--max-num-seqs", type=int, default=_DEFAULTS.max_num_seqs, help="canvases that run at a time")
    group.add_argument(
        "--max-model-len",
        type=int,
        help="longest canvas: prompt and response, in tokens (default: the model's, 4096 at most)",
    )
    group.add_argument("--max-row-layers", type=int, help="row-layers that one step may compute")
    group.add_argument(
        "--max-client-row-layers",
        type=int,
        help="row-layers that a client's requests may compute in a step in which others have some (default: those of "
        "the longest canvas)",
    )
    group.add_argument("--max-refreshes", type=int, help="requests that may refresh in one step")
    group.add_argument("--max-steps", type=int, help="steps that a request may ask for (default 4 x --max-model-len)")
    group.add_argument("--max-request-row-layers", type=int, help="row-layers that a request may cause in all")
    group.add_argument(
        "--page-size", type=int, help="token slots a page; whole blocks of a block-causal model (default 16)"
    )
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
    group.add_argument(
        "--eviction",
        default=_DEFAULTS.eviction,
        choices=EVICTIONS,
        metavar="|".join(EVICTIONS),
        help="order of eviction",
    )
    group.add_argument(
        "--prefix-sharing",
        default=_DEFAULTS.prefix_sharing,
        choices=PREFIX_SHARINGS,
        metavar="|".join(PREFIX_SHARINGS),
        help="the leading part of a prompt that bidirectional models share: off none, exact what the request says, "
        "auto also what recent prompts begin with (default exact)",
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
        choices=PREFIX_MATCHES,
        metavar="|".join(PREFIX_MATCHES),
        help="longest: read the longest stored part of a shared prefix that is not stored (default exact)",
    )
    group.add_argument(
        "--prefix-cover",
        type=float,
        default=_DEFAULTS.prefix_cover,
        help="share of a shared prefix that such a part must cover, also under auto "
        f"(default {_DEFAULTS.prefix_cover})",
    )
    add_batch_invariant(group)
    group.add_argument(
        "--attention",
        default=_DEFAULTS.attention,
        choices=ATTENTIONS,
        metavar="|".join(ATTENTIONS),
        help="what computes attention; auto: triton on CUDA, torch elsewhere; numpy is slow, to compare with "
        f"(default {_DEFAULTS.attention})",
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
        help="repeat layers as device graphs, which saves launches on a GPU; dense models on one device "
        "(default: where proven)",
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
