"""Options that several commands share: the model, the engine, the cache, and defaults of requests.

Nothing here imports PyTorch or NumPy, so that help and errors of the command line appear at once.
"""

import argparse
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from remask.checkpoint.settings import LoadSettings
from remask.checks import BUNDLED_MODELS, in_words
from remask.checks.fields import Group, declared
from remask.cli import early
from remask.cli.flags import add_flags
from remask.cli.parser import CONFIG, FURTHER
from remask.engine.config import AUTO, EngineConfig


def further_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Return the group of a command's options that `--help` leaves out, after making it if it is missing."""
    group = next((group for group in parser._action_groups if group.title == FURTHER), None)
    return group or parser.add_argument_group(FURTHER)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, which `remask.cli.parser` reads."""
    parser.add_argument(CONFIG, metavar="FILE", help="YAML or JSON object of these flags; the command line wins")


def add_cache_options(parser: argparse._ActionsContainer, default: str | None = AUTO) -> None:
    """Add `--cache` and `--cache-config`."""
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

    Args:
        model: the default of `--model`; None makes it required.
        depths: add `--depth-table`, for commands that run cache policies.
        texts: add `--tokenizer` and `--chat-template`, for commands that read text.
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
    text_settings = ("tokenizer", "chat_template")
    if not texts:
        parser.set_defaults(**dict.fromkeys(text_settings))
    settings = ("load_format", *(text_settings if texts else ()), "check_weights", "adapter", "force", "hf_overrides")
    add_flags(group, LoadSettings, (*settings, "dtype", "quantization", "device"))
    if depths:
        group.add_argument(
            "--depth-table",
            metavar="FILE|none",
            help="depth table written by 'remask profile', read as it is; none: start from no table (default: earned)",
        )
    else:
        parser.set_defaults(depth_table=None)
    add_flags(group, LoadSettings, ("threads",))
    parser.set_defaults(early=early.check)


def add_lora_modules(parser: argparse.ArgumentParser) -> None:
    """Add `--lora-modules` and its limits, for commands whose requests may name an adapter."""
    group = parser.add_argument_group("adapters")
    add_flags(group, LoadSettings, ("adapters", "max_lora_rank"))
    group.add_argument(
        "--enable-lora", action="store_true", help="refuse to start without --lora-modules, which alone suffice"
    )


def add_tensor_parallel(parser: argparse._ActionsContainer) -> None:
    """Add `--tensor-parallel`, for commands that only read answers of the model."""
    add_flags(parser, LoadSettings, ("tensor_parallel",))


def add_engine_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the fields of `EngineConfig` as options. `defaults` replace the declared ones, by field name."""
    add_flags(parser.add_argument_group("engine"), EngineConfig, **defaults)


class FieldsAction(argparse.Action):
    """Prints the fields of a request, then ends the process, as `--help` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(fields_text())
        parser.exit()


def add_default_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for what a request line leaves out: the cache, its settings, and sampling parameters."""
    add_cache_options(parser)
    text = "sampling parameters, on top of the model's own; a line's come on top of these"
    parser.add_argument("--sampling", metavar="JSON", help=text)
    parser.add_argument("--help-fields", action=FieldsAction, nargs=0, help="list the fields of a request and exit")


WIDTH = 100  # of the list of fields


def fields_text() -> str:
    """Return the fields of a request, with their values, defaults and meanings, and the remasking rules, as text."""
    # Imported here, as the declared fields need NumPy.
    from remask.denoising.rules import RULES
    from remask.request.sampling_params import SamplingParams
    from remask.request.terms import Terms

    parts = [
        'Sampling parameters, as in --sampling \'{"max_tokens": 64}\' and in the object "sampling" of a line:',
        *_field_entries(SamplingParams),
        "Terms, beside the prompt of a line:",
        *_field_entries(Terms),
        "Values of remasking, and of remasking.rule:",
        *(_entry(rule.name, f"{rule.meaning} For {in_words(rule.kinds)} models.") for rule in RULES.usable().values()),
    ]
    return "\n".join(parts)


def _field_entries(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield an entry for each field of a declared class, and behind that of a group those of its fields."""
    for name, field in declared(cls).items():
        if isinstance(field.values, Group):
            yield _entry(prefix + name, f"{field.values.words}. {field.meaning} Its fields:")
            yield from _field_entries(field.values.cls, f"{prefix}{name}.")
            continue
        default = "" if field.default is None else f"; default {json.dumps(field.default)}"
        yield _entry(prefix + name, f"{field.values.words}{default}. {field.description}")


def _entry(name: str, text: str) -> str:
    """Return `name` as a line, and `text` indented below it."""
    margin = " " * 6
    filled = textwrap.fill(text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
    return f"  {name}\n{filled}"
