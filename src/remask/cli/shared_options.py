"""Options that several commands share: the model, the engine, the cache, what a line of requests leaves out.

Nothing here imports PyTorch or NumPy, so that help and errors of the command line cost no time.
"""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from remask.checks import ATTENTIONS, BUNDLED_MODELS, QUANTIZATIONS, in_words
from remask.checks.fields import Group, declared
from remask.cli import early
from remask.cli.parser import CONFIG, FURTHER
from remask.engine.config import AUDIT_BOUND, AUTO, DEFAULT_UTILIZATION, EngineConfig
from remask.store import EVICTIONS, PREFIX_MATCHES, PREFIX_SHARINGS

_DEFAULTS = EngineConfig()


def further(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The group of a command's own options that its short help leaves out."""
    found = next((group for group in parser._action_groups if group.title == FURTHER), None)
    return found or parser.add_argument_group(FURTHER)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, which `remask.cli.parser` reads."""
    parser.add_argument(CONFIG, metavar="FILE", help="YAML or JSON object of these flags; the command line wins")


def add_cache_options(parser: argparse._ActionsContainer, default: str | None = AUTO) -> None:
    """Add `--cache` and `--cache-config`. Commands have one default, that of `LLM`."""
    parser.add_argument(
        "--cache",
        default=default,
        metavar="SPEC",
        help="policy, composition or FILE.py:CLASS; auto: bicache at the depth that audits earn on masked models, "
        "exact on block-causal ones, else none (default auto)",
    )
    parser.add_argument("--cache-config", metavar="JSON", help="settings of the policy")


def add_model_options(
    parser: argparse.ArgumentParser, model: str | None = None, *, depths: bool = True, texts: bool = True
) -> None:
    """Add `--model`, `--dtype` and the other options that choose weights and device.

    `model` is the default. `depths` says whether the command may run a policy that looks a depth up, `texts` whether it
    may read any.
    """
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=model,
        required=model is None,
        help=f"folder, GGUF file, hub id or ID:FILE.gguf of a checkpoint, "
        f"{', '.join(map(repr, BUNDLED_MODELS))}, a name that 'remask models' lists, or with --load-format dummy "
        "a preset" + (f" (default {model})" if model else ""),
    )
    group.add_argument(
        "--load-format",
        default="auto",
        choices=("auto", "dummy"),
        help="dummy: random weights of a preset's shape, which read texts as bytes",
    )
    if texts:
        group.add_argument(
            "--tokenizer", metavar="PATH_OR_ID", help="folder, GGUF file or hub id of the tokenizer (default: MODEL's)"
        )
        group.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the tokenizer's own")
    else:
        parser.set_defaults(tokenizer=None, chat_template=None)
    group.add_argument(
        "--skip-weight-check", action="store_true", help="load a checkpoint that holds NaN or infinities"
    )
    add_adapter(group)
    group.add_argument(
        "--force", action="store_true", help="load a model that does not fit this machine, or has unknown keys"
    )
    group.add_argument("--hf-overrides", metavar="JSON", help="keys laid over those of MODEL's config.json")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default auto)")
    group.add_argument(
        "--quantization",
        choices=("auto", "none", *QUANTIZATIONS),
        metavar="|".join(("auto", "none", *QUANTIZATIONS)),
        help="quantize the weights: int8 or int4 on CPUs, fp8 on CUDA devices that have it, or none; auto: the fastest "
        "that fits on a CPU (default: as the model's files advise, else the widest that fits)",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default auto)")
    if depths:
        group.add_argument(
            "--depth-table",
            metavar="FILE|none",
            help="depth table written by 'remask profile', read as it is; none: start from no table (default: earned)",
        )
    else:
        parser.set_defaults(depth_table=None)
    add_threads_option(group)
    parser.set_defaults(early=early.check)


def add_adapter(group: argparse._ActionsContainer) -> None:
    """`--adapter`, for commands that take it without the other options of the model."""
    text = "low-rank adapter in PEFT's layout, a folder or hub id, merged into the weights"
    group.add_argument("--adapter", metavar="PATH", help=text)


def add_lora_modules(parser: argparse.ArgumentParser) -> None:
    """`--lora-modules` and its limits, for commands whose requests may name an adapter."""
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="adapters beside the weights, each a folder or hub id, or an object of name and path; a request names one "
        "as its model, or as its adapter",
    )
    group.add_argument("--max-lora-rank", type=int, metavar="R", help="largest rank of these (default: any)")
    group.add_argument(
        "--enable-lora", action="store_true", help="refuse to start without --lora-modules, which alone suffice"
    )


def add_threads_option(group: argparse._ActionsContainer) -> None:
    """`--threads`, for commands that take it without the other options of the model."""
    text = "CPU threads to compute on (default: by the model's size and the cores that are free)"
    group.add_argument("--threads", type=int, metavar="N", help=text)


def add_tensor_parallel(parser: argparse._ActionsContainer) -> None:
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
    """Add the options that limit the engine: the fields of `EngineConfig`, with their defaults."""
    group = parser.add_argument_group("engine")

    def add(flag: str, text: str, **more: Any) -> None:
        group.add_argument(flag, default=getattr(_DEFAULTS, flag[2:].replace("-", "_")), help=text, **more)

    def choose(flag: str, among: Sequence[str], text: str) -> None:
        add(flag, text, choices=among, metavar="|".join(among))

    add("--max-num-seqs", "canvases that run at a time", type=int)
    add(
        "--max-model-len",
        "longest canvas: prompt and response, in tokens (default: the model's, 4096 at most)",
        type=int,
    )
    add("--max-row-layers", "row-layers that one step may compute", type=int)
    add(
        "--max-client-row-layers",
        "row-layers that a client's requests may compute in a step in which others have some (default: those of "
        "the longest canvas)",
        type=int,
    )
    add("--max-refreshes", "requests that may refresh in one step", type=int)
    add("--max-steps", "steps that a request may ask for (default 4 x --max-model-len)", type=int)
    add("--max-request-row-layers", "row-layers that a request may cause in all", type=int)
    add("--page-size", "token slots a page; whole blocks of a block-causal model (default 16)", type=int)
    add(
        "--store-budget-tokens",
        f"tokens the prefix store may hold (default {_DEFAULTS.store_budget_tokens}; auto: on CUDA what has room)",
        type=tokens_or_auto,
        metavar="N|auto",
    )
    add(
        "--gpu-memory-utilization",
        f"share of a CUDA device's memory that may be taken (default {DEFAULT_UTILIZATION})",
        type=float,
        metavar="SHARE",
    )
    choose("--eviction", EVICTIONS, "order of eviction")
    choose(
        "--prefix-sharing",
        PREFIX_SHARINGS,
        "the leading part of a prompt that bidirectional models share: off none, exact what the request says, "
        "auto also what recent prompts begin with (default exact)",
    )
    add(
        "--prefix-min",
        f"shortest part that auto shares (default {_DEFAULTS.prefix_min})",
        type=int,
        metavar="TOKENS",
    )
    choose(
        "--prefix-match",
        PREFIX_MATCHES,
        "longest: read the longest stored part of a shared prefix that is not stored (default exact)",
    )
    add(
        "--prefix-cover",
        f"share of a shared prefix that such a part must cover, also under auto (default {_DEFAULTS.prefix_cover})",
        type=float,
    )
    add("--batch-invariant", "answers do not depend on what else runs, bit for bit; slower", action="store_true")
    add(
        "--audit",
        "share of requests of which what the cache approximates is computed too, to compare predictions; off: none, "
        "and depths are not earned (default 1/64)",
        type=share_or_off,
        metavar="SHARE|off",
    )
    add(
        "--audit-bound",
        "nats by which predictions may move in the mean: depths are earned up to it, and a warning comes beyond it "
        f"(default {AUDIT_BOUND})",
        type=float,
        metavar="NATS",
    )
    choose(
        "--attention",
        ATTENTIONS,
        "what computes attention; auto: triton on CUDA, torch elsewhere; numpy is slow, to compare with "
        f"(default {_DEFAULTS.attention})",
    )
    add(
        "--overlap",
        "queue a pass before the one before it is read; answers are the same (default: on CUDA, with graphs, "
        "where a model's layers have 100 MB of weights)",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "--graphs",
        "repeat layers as device graphs, which saves launches on a GPU; dense models on one device "
        "(default: on CUDA, where they agree with PyTorch at the start)",
        action=argparse.BooleanOptionalAction,
    )


def share_or_off(text: str) -> float:
    """A share of requests, as a number or as a fraction such as 1/64; "off" is 0."""
    if text == "off":
        return 0.0
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(
            f"expected a number from 0 to 1, a fraction such as 1/64, or off, got {text!r}"
        ) from error


def tokens_or_auto(text: str) -> int | str:
    """A number of tokens, or "auto"."""
    return text if text == AUTO else int(text)


class FieldsAction(argparse.Action):
    """Prints the fields of a request, then ends the process as `--help` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(listing())
        parser.exit()


def add_default_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that give values to what a line leaves out."""
    add_cache_options(parser)
    text = "sampling parameters, on top of the model's own; a line's come on top of these"
    parser.add_argument("--sampling", metavar="JSON", help=text)
    parser.add_argument("--help-fields", action=FieldsAction, nargs=0, help="list the fields of a request and exit")


WIDTH = 100  # of the list of fields


def listing() -> str:
    """Return every declared field with its values, default and meaning, and the remasking rules, as text."""
    # Imported here, as the fields' values need NumPy, and the option is seldom given.
    from remask.denoising.rules import RULES
    from remask.request.sampling_params import SamplingParams
    from remask.request.terms import Terms

    parts = [
        'Sampling parameters, as in --sampling \'{"max_tokens": 64}\' and in the object "sampling" of a line:',
        *_fields(SamplingParams),
        "Terms, beside the prompt of a line:",
        *_fields(Terms),
        "Values of remasking, and of remasking.rule:",
        *(_entry(rule.name, f"{rule.meaning} For {in_words(rule.kinds)} models.") for rule in RULES.usable().values()),
    ]
    return "\n".join(parts)


def _fields(cls: type[Any], prefix: str = "") -> Iterator[str]:
    for name, field in declared(cls).items():
        if isinstance(field.values, Group):
            yield _entry(name, f"{field.values.words}. {field.meaning} Its fields:")
            yield from _fields(field.values.cls, f"{name}.")
            continue
        default = "" if field.default is None else f"; default {json.dumps(field.default)}"
        yield _entry(prefix + name, f"{field.values.words}{default}. {field.described}")


def _entry(name: str, text: str) -> str:
    margin = " " * 6
    filled = textwrap.fill(text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
    return f"  {name}\n{filled}"
