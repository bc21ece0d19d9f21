"""What the options that several commands share come to: the engine's limits, the model, its banner, objects of JSON.

The banner is three lines that tell people what runs, where, and what to do next. All choices are in the log.

Nothing imports PyTorch before a model is opened, as `remask.cli.early` checks what options come to before that.
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
from remask.cli.logs import tell_people
from remask.engine.config import AUTO, EngineConfig
from remask.errors import ConfigError
from remask.server.config import KvEventsConfig, ServerLimits

if TYPE_CHECKING:
    from remask.llm import LLM
    from remask.policies import CachePolicy

_LOADED: Final = {name for name, each in declared(LoadSettings).items() if each.flags != ()}
KEY_VARIABLE: Final = "REMASK_API_KEY"
PRIORITY_KEY_VARIABLE: Final = "REMASK_PRIORITY_KEY"
MAX_PORT = 65535


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's limits as the options give them."""
    return EngineConfig(**{each.name: getattr(args, each.name) for each in fields(EngineConfig)})


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `LLM` that say how the model is loaded."""
    given = {name: value for name, value in vars(args).items() if name in _LOADED}
    return {
        **given,
        "adapters": adapters_option(args),
        "hf_overrides": object_option("--hf-overrides", given.get("hf_overrides")),
        "chat_template": read_template(args.chat_template),
        "depth_table": args.depth_table,
    }


def read_template(path: str | None) -> str | None:
    """Return the Jinja text of the file `path`; None without a path. Raises `ConfigError` if it cannot be read."""
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
    **more: Any,
) -> LLM:
    """Load the model that the options name, and a policy that is in a file; then show the banner of the command.

    What the command `reads` is checked before the weights are read. `more` are further arguments of `LLM`. Raises what
    `LLM` raises.
    """
    from remask.llm import LLM
    from remask.policies.registry import from_file

    policy, settings = from_file(cache, cache_config, "--cache")
    told = {"cache": policy, "cache_config": settings, "engine": engine, "reads": reads, "progress": args.progress}
    llm = LLM(args.model, **told, **model_settings(args), **more)
    if args.banner is not None:
        where, then = args.banner
        show_banner(args, llm, where, then.format(model=args.model))
    return llm


def adapters_option(args: argparse.Namespace) -> dict[str, str]:
    """Return the paths of `--lora-modules` by name; none for commands without it. Raises `ConfigError`."""
    found: dict[str, str] = {}
    words: list[str] = vars(args).get("adapters") or []
    for word in words:
        name, _, path = word.partition("=")
        if word.startswith("{"):
            given = json_object("--lora-modules", word)
            if given.keys() != {"name", "path"} or not all(isinstance(value, str) for value in given.values()):
                raise ConfigError(
                    f'--lora-modules: {word!r} must be an object of two texts, {{"name": ..., "path": ...}}'
                )
            name, path = given["name"], given["path"]
        if not name or not path:
            raise ConfigError(f'--lora-modules: {word!r} must be NAME=PATH or {{"name": ..., "path": ...}}')
        if name in found:
            raise ConfigError(f"--lora-modules: {name!r} names two adapters, {found[name]!r} and {path!r}")
        found[name] = path
    if getattr(args, "enable_lora", False) and not found:
        raise ConfigError("--enable-lora: no adapter is named; give them with --lora-modules NAME=PATH")
    return found


def open_text(path: str, mode: str) -> TextIO:
    """Open a text file in UTF-8. Raises `ConfigError` if it cannot be opened."""
    try:
        # Bytes that are not UTF-8 reach the tokenizer as lone surrogates, which it refuses line by line.
        return Path(path).open(mode, encoding="utf-8", errors="surrogateescape")  # type: ignore[return-value]
    except OSError as error:
        raise ConfigError(f"cannot open {path!r}: {error.strerror}") from error


def check_folder(option: str, path: str | None) -> None:
    """Raise `ConfigError` if the folder of `path` does not exist, before a long measurement fails to write there."""
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {str(Path(path).parent)!r}; make it, or name another file")


def object_option(option: str, text: str | None) -> dict[str, Any]:
    """Return the JSON object given to `option`, or an empty one. Raises `ConfigError` on anything else."""
    return {} if text is None else json_object(option, text)


def sampling_option(args: argparse.Namespace) -> dict[str, Any]:
    """Return `--sampling`, which comes on top of the model's own defaults. Raises `ConfigError` on bad parameters."""
    # Imported here, as the fields' values need NumPy, and most commands are given none.
    from remask.request.sampling_params import SamplingParams
    from remask.request.terms import check_sampling

    sampling = object_option("--sampling", args.sampling)
    check_sampling(sampling)
    SamplingParams.from_mapping(sampling)
    return sampling


def server_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `ServerConfig`. `args.model` must be set. Raises `ConfigError` on a bad port."""
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
        "root_path": getattr(args, "root_path", ""),  # a fleet has none
        "tools_by_form": args.tools_by_form,
        "kv_events": _kv_events(getattr(args, "kv_events_config", None)),
    }


def _kv_events(text: str | None) -> KvEventsConfig | None:
    option = "--kv-events-config"
    return None if text is None else parse(KvEventsConfig, json_object(option, text), option, f"field of {option}")


def show_banner(args: argparse.Namespace, llm: LLM, where: str, then: str) -> None:
    """Tell people what runs, `where`, and what to do `then`, once in a command that opens several models."""
    if not vars(args).get("banner_shown"):
        args.banner_shown = True
        command = " ".join([args.command, *filter(None, [vars(args).get("subject")])])
        tell_people(args, f"remask {command}: {what_runs(args, llm)}\n  {where}\n  next: {then}")


def what_runs(args: argparse.Namespace, llm: LLM) -> str:
    """The model, its size, where and in which numbers it computes, and the cache that the options name."""
    import torch

    config, device = llm.loaded.config, llm.model.device
    threads = torch.get_num_threads()
    cores = f" ({threads} thread{'s' if threads > 1 else ''})" if device.type == "cpu" else ""
    parts = [
        f"{args.model} ({config.family}, {size_text(config.parameters)} parameters) on {device}{cores}",
        str(llm.model.dtype).removeprefix("torch."),
    ]
    if llm.loaded.quantization is not None:
        parts.append(f"matrices {llm.loaded.quantization}")
    named = vars(args).get("cache", "")
    if named != "":
        parts.append(f"cache {llm.session.cache_name if named in (None, AUTO) else named}")
    return ", ".join(parts)


def size_text(number: int) -> str:
    """A number of parameters in three digits: 455 k, 8.02 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
