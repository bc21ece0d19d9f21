"""Reads the options that several commands share: engine limits, the model, server settings, JSON objects.

The banner of a command is three lines for people: what runs, where its output goes, and what to run next. All settings
are in the log. PyTorch is imported only when a model is opened, as `remask.cli.early` checks options before that.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from remask.checkpoint.settings import LoadSettings, Reads
from remask.checks.fields import declared, parse
from remask.checks.values import check_whole, json_object
from remask.cli.logs import print_notice
from remask.engine.config import AUTO, EngineConfig
from remask.errors import ConfigError
from remask.server.config import KvEventsConfig, ServerLimits

if TYPE_CHECKING:
    from remask.llm import LLM
    from remask.policies import CachePolicy

_LOAD_OPTIONS: Final = {name for name, field in declared(LoadSettings).items() if field.flags != ()}
KEY_VARIABLE: Final = "REMASK_API_KEY"
PRIORITY_KEY_VARIABLE: Final = "REMASK_PRIORITY_KEY"
MAX_PORT = 65535


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's limits. Raises `ConfigError` on a value that is not allowed."""
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `LLM` about loading the model. Raises `ConfigError` on a value that is not allowed."""
    options = {name: value for name, value in vars(args).items() if name in _LOAD_OPTIONS}
    return {
        **options,
        "adapters": adapters_option(args),
        "hf_overrides": object_option("--hf-overrides", options.get("hf_overrides")),
        "chat_template": read_template(args.chat_template),
        "depth_table": args.depth_table,
    }


def read_template(path: str | None) -> str | None:
    """Return the Jinja text of a file; None without a path. Raises `ConfigError` if the file cannot be read."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path!r}: {error}") from error


def open_llm(
    args: argparse.Namespace,
    cache: str | CachePolicy = "none",
    cache_config: dict[str, Any] | None = None,
    engine: EngineConfig | None = None,
    reads: Reads = "tokens",
    **settings: Any,
) -> LLM:
    """Load the model of the options, and the policy if `cache` is `FILE.py:CLASS`, and print the command's banner.

    `reads` is what the command reads prompts as, which is checked before weights are read. `settings` are further
    arguments of `LLM`. Raises `ConfigError`, `CheckpointError` and `TableError` as `LLM` does.
    """
    from remask.llm import LLM
    from remask.policies.registry import from_file

    policy, policy_settings = from_file(cache, cache_config, "--cache")
    llm = LLM(
        args.model,
        cache=policy,
        cache_config=policy_settings,
        engine=engine,
        reads=reads,
        progress=args.progress,
        **model_settings(args),
        **settings,
    )
    if args.banner is not None:
        output, next_command = args.banner
        print_banner(args, llm, output, next_command.format(model=args.model))
    return llm


def adapters_option(args: argparse.Namespace) -> dict[str, str]:
    """Return the paths of `--lora-modules` by name; empty without the option. Raises `ConfigError` on a bad value."""
    paths: dict[str, str] = {}
    words: list[str] = vars(args).get("adapters") or []
    for word in words:
        name, _, path = word.partition("=")
        if word.startswith("{"):
            module = json_object("--lora-modules", word)
            if module.keys() != {"name", "path"} or not all(isinstance(value, str) for value in module.values()):
                raise ConfigError(
                    f'--lora-modules: {word!r} must be an object of two texts, {{"name": ..., "path": ...}}'
                )
            name, path = module["name"], module["path"]
        if not name or not path:
            raise ConfigError(f'--lora-modules: {word!r} must be NAME=PATH or {{"name": ..., "path": ...}}')
        if name in paths:
            raise ConfigError(f"--lora-modules: {name!r} names two adapters, {paths[name]!r} and {path!r}")
        paths[name] = path
    if getattr(args, "enable_lora", False) and not paths:
        raise ConfigError("--enable-lora: no adapter is named; give them with --lora-modules NAME=PATH")
    return paths


def open_text(path: str) -> TextIO:
    """Open a file to read it as UTF-8 text. Raises `ConfigError` if it cannot be opened."""
    try:
        # Bytes that are not UTF-8 become lone surrogates, which the tokenizer refuses for their own line alone.
        return Path(path).open(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"cannot open {path!r}: {error.strerror}") from error


def check_folder(option: str, path: str | None) -> None:
    """Raise `ConfigError` if the parent folder of `path` does not exist."""
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {str(Path(path).parent)!r}; make it, or name another file")


def object_option(option: str, text: str | None) -> dict[str, Any]:
    """Parse the value of `option`, a JSON object; empty without one. Raises `ConfigError` if it is not an object."""
    return {} if text is None else json_object(option, text)


def sampling_option(args: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of `--sampling`. Raises `ConfigError` on a name or value that is not allowed."""
    # Imported here, as the declared fields need NumPy.
    from remask.request.sampling_params import SamplingParams
    from remask.request.terms import check_sampling

    sampling = object_option("--sampling", args.sampling)
    check_sampling(sampling)
    SamplingParams.from_mapping(sampling)
    return sampling


def server_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `ServerConfig`. `args.model` must be set. Raises `ConfigError` on a value not allowed."""
    check_whole("--port", args.port, low=0, high=MAX_PORT)
    return {
        "model_names": args.served_model_name or [args.model],
        "api_keys": [*(args.api_key or []), *filter(None, [os.environ.get(KEY_VARIABLE)])],
        "sampling": sampling_option(args),
        "seed": args.seed,
        "priority_keys": [*(args.priority_key or []), *filter(None, [os.environ.get(PRIORITY_KEY_VARIABLE)])],
        **{name: value for name, value in vars(args).items() if name in declared(ServerLimits)},
        "open_metrics": args.open_metrics,
        "allowed_origins": args.allowed_origins,
        "allowed_hosts": [args.host, *args.allowed_hosts],
        "root_path": getattr(args, "root_path", ""),  # `remask deploy` has no such option
        "tools_by_form": args.tools_by_form,
        "kv_events": _kv_events_option(getattr(args, "kv_events_config", None)),
    }


def _kv_events_option(text: str | None) -> KvEventsConfig | None:
    """Parse `--kv-events-config`; None without it. Raises `ConfigError` on a field that is not allowed."""
    option = "--kv-events-config"
    return None if text is None else parse(KvEventsConfig, json_object(option, text), option, f"field of {option}")


def print_banner(args: argparse.Namespace, llm: LLM, output: str, next_command: str) -> None:
    """Print a banner for people: the model, where the output goes, and what to run next. Only once for `args`."""
    if not vars(args).get("has_banner"):
        args.has_banner = True
        command = " ".join([args.command, *filter(None, [vars(args).get("subject")])])
        print_notice(args, f"remask {command}: {model_summary(args, llm)}\n  {output}\n  next: {next_command}")


def model_summary(args: argparse.Namespace, llm: LLM) -> str:
    """Return a line about the model: name, family, size, device, dtype, quantization, and the cache of the options."""
    import torch

    config = llm.loaded.config
    device = llm.model.device
    place = str(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        place += " (1 thread)" if threads == 1 else f" ({threads} threads)"
    facts = [
        f"{args.model} ({config.family}, {size_text(config.parameters)} parameters) on {place}",
        str(llm.model.dtype).removeprefix("torch."),
    ]
    if llm.loaded.quantization is not None:
        facts.append(f"{llm.loaded.quantization} weights")
    if "cache" in args:
        facts.append(f"cache {llm.session.cache_name if args.cache in (None, AUTO) else args.cache}")
    return ", ".join(facts)


def size_text(number: int) -> str:
    """Return a number of parameters with three digits and a unit, such as "455 k" or "8.02 B"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
