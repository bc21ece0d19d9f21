"""What is refused before PyTorch is imported, which takes seconds: names, files, ports, numbers and JSON of options.

Reading weights takes minutes, so what is left is refused before that. Nothing here imports PyTorch.
"""

import argparse
import importlib.util
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import fields

from remask.checks import BUNDLED_MODELS, QUANTIZATIONS
from remask.checks.plugins import install_line
from remask.checks.values import check_real, check_whole, json_list, json_object
from remask.cli import options
from remask.cli.commands import OWN
from remask.engine.config import EngineConfig
from remask.errors import CheckpointError, ConfigError, UnknownNameError
from remask.server.config import ServerConfig, bind

# Options of any command that name files to be read, objects of JSON, and cache policies, which these words stand for
# too.
_READ = ("input", "prompts", "depth_table", "chat_template")
_OBJECTS = ("cache_config", "hf_overrides", "task_settings")
_POLICIES, _ANY = ("cache", "caches"), ("all", "auto", "none")
_SERVED = ("fastapi", "uvicorn", "pydantic", "prometheus_client")  # packages that a server needs


def check(args: argparse.Namespace) -> None:
    """Check the options that commands with a model share, as far as that needs no model.

    Raises `ConfigError` where a file is missing or a value is not allowed, what `remask.policies.parse` raises of a
    policy, and `CheckpointError` where a model or an adapter is no folder, no file, and no name that there is.
    """
    given = vars(args)
    for option in _READ:
        if (option, given.get(option)) != ("depth_table", "none"):
            check_file(_flag(option), given.get(option))
    options.check_folder("--output", given.get("output"))
    if all(field.name in given for field in fields(EngineConfig)):
        options.engine_config(args)
    for option in _OBJECTS:
        options.object_option(_flag(option), given.get(option))
    if given.get("sampling") is not None:
        _check_sampling(args)
    options.adapters_option(args)
    options.read_template(given.get("chat_template"))
    for option in _POLICIES:
        check_policies(given.get(option))
    check_numbers(given.get("dtype"), given.get("device"))
    named = [given.get(name) for name in ("served", "named", "model")]
    if "" in named:  # as of a variable of a shell that is not set
        raise ConfigError("the model is an empty text; name one, or leave it out")
    model = next(filter(None, named), None)
    if model is not None:
        check_model(model, given.get("load_format", "auto"), given.get("hf_overrides"))
    if given.get("adapter") is not None:
        check_adapter(args.adapter)


def check_extra(extra: str, *needed: str) -> None:
    """Raise `ConfigError` if packages of an extra are missing."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: {install_line(extra)}")


def check_fleet(args: argparse.Namespace) -> None:
    """As `check`, and the packages and the settings of servers behind Ray Serve."""
    check_extra("ray", *_SERVED, "ray")
    if args.port == 0:
        raise ConfigError("--port 0 is not possible here, because Ray Serve does not choose a free port; give a port")
    _check_served(args)


def check_server(args: argparse.Namespace) -> None:
    """As `check`, and the packages and the settings of a server, and whether it can listen on its address."""
    check_extra("server", *_SERVED, "yaml")
    check_whole("--port", args.port, low=0, high=options.MAX_PORT)
    with closing(bind(args.host, args.port)):
        pass  # it is bound again, once all is imported
    _check_served(args)


def _check_served(args: argparse.Namespace) -> None:
    check(args)
    ServerConfig(**options.server_settings(args) | {"model_names": args.served_model_name or ["model"]})


def check_answers(args: argparse.Namespace) -> None:
    """As `check`, and what `remask generate` is given beside."""
    check(args)
    for name, own in (("system", "messages"), ("canvas", "canvas"), ("suffix", "suffix")):
        if getattr(args, name) is not None and args.prompt is None:
            raise ConfigError(f"--{name} goes with --prompt; the lines of --input have {own} of their own")
    if args.canvas is not None:
        json_list("--canvas", args.canvas)
    if args.input is not None and os.path.isfile(args.input):  # a pipe can be read once
        with options.open_text(args.input, "r") as lines:
            check_objects(args.input, lines)


def check_questions(args: argparse.Namespace) -> None:
    """As `check`, and whether the file of `remask decide` is an object."""
    check(args)
    if os.path.isfile(args.input):
        with options.open_text(args.input, "r") as source:
            json_object(f"--input {args.input}", source.read())


def check_quantized(args: argparse.Namespace) -> None:
    """Check the options of `remask quantize`."""
    if args.quantization not in QUANTIZATIONS:
        raise UnknownNameError("quantization", args.quantization, QUANTIZATIONS)
    check_model(args.model)
    options.check_folder("--output", args.output)


def check_pulled(args: argparse.Namespace) -> None:
    """Raise `ConfigError` where `remask models` lists no such model, and it is no id of a hub."""
    from remask.checkpoint.shelf import SHELF, suggest_models
    from remask.checkpoint.source import is_hub_id

    if args.name not in (*SHELF, *BUNDLED_MODELS) and not is_hub_id(args.name):
        raise ConfigError(
            f"There is no model {args.name!r} to download.{suggest_models(args.name)} `remask models` lists names; "
            "a hub id reads 'organisation/name'."
        )


def check_inspected(args: argparse.Namespace) -> None:
    """Check the options of `remask inspect model`."""
    check_real("--memory", args.memory, low=0, above=True, optional=True)
    from remask.families import presets

    shapes = presets()
    if args.path not in shapes:
        try:
            check_model(args.path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}\nPresets: {', '.join(sorted(shapes))}.") from error
    if args.adapter is not None:
        check_adapter(args.adapter)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _check_sampling(args: argparse.Namespace) -> None:
    """Check the names, and the values where the command does not lay them over others first."""
    if args.command in OWN:
        options.sampling_option(args)
        return
    from remask.request.terms import check_sampling

    check_sampling(options.object_option("--sampling", args.sampling))


def check_numbers(dtype: str | None, device: str | None) -> None:
    """Raise where there is no such number format, or no such device: `UnknownNameError` and `ConfigError`."""
    from remask.machine.cpu import may_have_gpu
    from remask.model.sizes import FORMATS

    if dtype is not None and dtype not in ("auto", *FORMATS):
        raise UnknownNameError("dtype", dtype, ["auto", *FORMATS])
    if device is not None and device.partition(":")[0] == "cuda" and not may_have_gpu():
        raise ConfigError(
            f"device {device!r} cannot be used (this machine has no driver of a CUDA device); use 'cpu', or 'auto', "
            "which takes one where there is one"
        )


def check_model(model: str, load_format: str = "auto", overrides: str | None = None) -> None:
    """Look for a model on this disk, and for its family in its `config.json`. No hub is asked.

    Raises `CheckpointError` where there is no such model, or its folder has no `config.json` that can be read, and
    `UnknownNameError` where no family claims it, or there is no such preset.
    """
    from remask.checkpoint.files import OVERRIDES, raw_config, read_json, read_model_defaults
    from remask.checkpoint.gguf_header import is_gguf
    from remask.checkpoint.source import ADAPTER_CONFIG, is_adapter, local
    from remask.families import family_of, preset

    if load_format == "dummy":
        preset(model)
        return
    folder = local(model)
    if folder is None or is_gguf(folder):
        return
    if is_adapter(folder):
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if isinstance(base, str) and base:
            local(base)
        return
    laid = read_model_defaults(folder).get(OVERRIDES, {}) | options.object_option("--hf-overrides", overrides)
    family_of(raw_config(folder) | laid)


def check_adapter(adapter: str) -> None:
    """Raise `CheckpointError` where an adapter is neither a folder nor a hub id."""
    from remask.checkpoint.source import local_adapter

    local_adapter(adapter)


def check_file(option: str, path: str | None) -> None:
    """Raise `ConfigError` if there is no file, pipe or device `path` to be read; "-" is standard input."""
    if path is not None and path != "-" and (not os.path.exists(path) or os.path.isdir(path)):
        raise ConfigError(f"{option}: there is no file {path!r}; check the name and the folder")


def check_objects(path: str, lines: Iterable[str]) -> None:
    """Raise `ConfigError` where there are `lines`, and none of them is an object. Reads up to the first that is."""
    fault = None
    for number, text in enumerate(lines, start=1):
        try:
            if text.strip():
                json_object("a line", text)
                return
        except ConfigError as error:
            fault = fault or ConfigError(f"{path}, line {number}: {error}; no line of the file is an object")
    if fault is not None:
        raise fault


def check_policies(specs: str | None) -> None:
    """Raise `ConfigError` if one of the `specs`, separated by commas, names no cache policy or no composition."""
    named = [] if specs is None else [name for spec in specs.split(",") if (name := spec.strip()) not in _ANY]
    if not named:
        return
    # Imported here, as policies need NumPy, and most commands name none.
    from remask.policies import parse
    from remask.policies.bicache import DepthLookup
    from remask.policies.registry import file_and_class

    for spec in named:
        file = file_and_class(spec)
        if file is None:
            parse(spec, None, lambda: DepthLookup({}))
        else:  # it is run later, once
            check_file("--cache", file[0])
