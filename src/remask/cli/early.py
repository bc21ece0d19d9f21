"""Checks of options that need no PyTorch, whose import takes seconds: names, files, ports, numbers and JSON objects.

What these checks leave is checked before weights are read, which takes minutes. Nothing here imports PyTorch.
"""

import argparse
import importlib.util
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import fields

from remask.checks import BUNDLED_MODELS, QUANTIZATIONS
from remask.checks.plugins import install_command
from remask.checks.values import check_real, check_whole, json_list, json_object
from remask.cli import options
from remask.cli.commands import BUILTIN_COMMANDS
from remask.engine.config import EngineConfig
from remask.errors import CheckpointError, ConfigError, UnknownNameError
from remask.server.config import ServerConfig, bind

_INPUT_FILE_OPTIONS = ("input", "prompts", "depth_table", "chat_template")
_JSON_OPTIONS = ("cache_config", "hf_overrides", "task_settings")
_POLICY_OPTIONS = ("cache", "caches")
_POLICY_KEYWORDS = ("all", "auto", "none")  # values of these that are no policies
_SERVER_PACKAGES = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


def check(args: argparse.Namespace) -> None:
    """Check the options that commands with a model share, as far as that needs no model.

    Raises `ConfigError` if a file is missing or a value is not allowed, the errors of `remask.policies.parse` on a
    policy, and `CheckpointError` if there is no such model or adapter.
    """
    values = vars(args)
    for option in _INPUT_FILE_OPTIONS:
        if (option, values.get(option)) != ("depth_table", "none"):
            check_file(_flag(option), values.get(option))
    options.check_folder("--output", values.get("output"))
    if all(field.name in values for field in fields(EngineConfig)):
        options.engine_config(args)
    for option in _JSON_OPTIONS:
        options.object_option(_flag(option), values.get(option))
    if values.get("sampling") is not None:
        _check_sampling(args)
    options.adapters_option(args)
    options.read_template(values.get("chat_template"))
    for option in _POLICY_OPTIONS:
        check_policies(values.get(option))
    check_dtype_and_device(values.get("dtype"), values.get("device"))
    models = [values.get(name) for name in ("positional_model", "model")]
    if "" in models:  # such as from an unset variable of the shell
        raise ConfigError("the model is an empty text; name one, or leave it out")
    model = next(filter(None, models), None)
    if model is not None:
        check_model(model, values.get("load_format", "auto"), values.get("hf_overrides"))
    if values.get("adapter") is not None:
        check_adapter(args.adapter)


def check_extra(extra: str, *packages: str) -> None:
    """Raise `ConfigError` if any of these packages of an extra is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: {install_command(extra)}")


def check_deploy(args: argparse.Namespace) -> None:
    """Check the options of `remask deploy`, and that its packages are installed. Raises errors as `check` does."""
    check_extra("ray", *_SERVER_PACKAGES, "ray")
    if args.port == 0:
        raise ConfigError("--port 0 is not possible here, because Ray Serve does not choose a free port; give a port")
    _check_server_settings(args)


def check_serve(args: argparse.Namespace) -> None:
    """Check the options of `remask serve`, that its packages are installed and that its address is free.

    Raises errors as `check` does.
    """
    check_extra("server", *_SERVER_PACKAGES, "yaml")
    check_whole("--port", args.port, low=0, high=options.MAX_PORT)
    with closing(bind(args.host, args.port)):
        pass  # the command binds it again after its imports
    _check_server_settings(args)


def _check_server_settings(args: argparse.Namespace) -> None:
    """Check the options that `serve` and `deploy` share. The model may have no name yet, so a placeholder stands in."""
    check(args)
    ServerConfig(**options.server_settings(args) | {"model_names": args.served_model_name or ["model"]})


def check_generate(args: argparse.Namespace) -> None:
    """Check the options of `remask generate`. Raises errors as `check` does."""
    check(args)
    for name, key in (("system", "messages"), ("canvas", "canvas"), ("suffix", "suffix")):
        if getattr(args, name) is not None and args.prompt is None:
            raise ConfigError(f"--{name} goes with --prompt; the lines of --input have {key} of their own")
    if args.canvas is not None:
        json_list("--canvas", args.canvas)
    if args.input is not None and os.path.isfile(args.input):  # a pipe can be read only once
        with options.open_text(args.input) as lines:
            check_objects(args.input, lines)


def check_decide(args: argparse.Namespace) -> None:
    """Check the options of `remask decide`, and that its file is a JSON object. Raises errors as `check` does."""
    check(args)
    if os.path.isfile(args.input):
        with options.open_text(args.input) as source:
            json_object(f"--input {args.input}", source.read())


def check_quantize(args: argparse.Namespace) -> None:
    """Check the options of `remask quantize`. Raises `UnknownNameError`, `ConfigError` and `CheckpointError`."""
    if args.quantization not in QUANTIZATIONS:
        raise UnknownNameError("quantization", args.quantization, QUANTIZATIONS)
    check_model(args.model)
    options.check_folder("--output", args.output)


def check_pull(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if the name is neither that of a listed model nor a hub id, or is that of a path here."""
    from remask.checkpoint.shelf import SHELF, suggest_models
    from remask.checkpoint.source import is_hub_id

    if args.name not in (*SHELF, *BUNDLED_MODELS) and not is_hub_id(args.name):
        raise ConfigError(
            f"There is no model {args.name!r} to download.{suggest_models(args.name)} `remask models` lists names; "
            "a hub id reads 'organisation/name'."
        )
    if args.name not in BUNDLED_MODELS and os.path.exists(os.path.expanduser(args.name)):
        raise ConfigError(
            f"{args.name!r} is a path in this folder, which other commands would load instead of what is downloaded: "
            "run this in another folder"
        )


def check_inspect_model(args: argparse.Namespace) -> None:
    """Check the options of `remask inspect model`. Raises `ConfigError` and `CheckpointError`."""
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
    """Check the names of `--sampling`, and the values unless the command merges them with others first."""
    if args.command in BUILTIN_COMMANDS:
        options.sampling_option(args)
        return
    from remask.request.terms import check_sampling

    check_sampling(options.object_option("--sampling", args.sampling))


def check_dtype_and_device(dtype: str | None, device: str | None) -> None:
    """Raise `UnknownNameError` on an unknown dtype, and `ConfigError` on a CUDA device without a CUDA driver.

    Other devices are checked when the model is loaded, as that needs PyTorch.
    """
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
    """Check that a model and its family exist, as far as this disk tells. No hub is asked.

    Raises `CheckpointError` if there is no such model or its `config.json` cannot be read, and `UnknownNameError` if
    its family, or with `load_format` "dummy" the preset, is unknown.
    """
    from remask.checkpoint.files import OVERRIDES, raw_config, read_json, read_model_defaults
    from remask.checkpoint.gguf_header import is_gguf
    from remask.checkpoint.source import ADAPTER_CONFIG, is_adapter, local_model
    from remask.families import family_of, preset

    if load_format == "dummy":
        preset(model)
        return
    folder = local_model(model)
    if folder is None or is_gguf(folder):
        return
    if is_adapter(folder):
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if isinstance(base, str) and base:
            local_model(base)
        return
    config = raw_config(folder) | read_model_defaults(folder).get(OVERRIDES, {})
    family_of(config | options.object_option("--hf-overrides", overrides))


def check_adapter(adapter: str) -> None:
    """Raise `CheckpointError` if an adapter is neither a folder nor a hub id."""
    from remask.checkpoint.source import local_adapter

    local_adapter(adapter)


def check_file(option: str, path: str | None) -> None:
    """Raise `ConfigError` if `path` is not a file, a pipe, a device, or "-" for standard input."""
    if path is not None and path != "-" and (not os.path.exists(path) or os.path.isdir(path)):
        raise ConfigError(f"{option}: there is no file {path!r}; check the name and the folder")


def check_objects(path: str, lines: Iterable[str]) -> None:
    """Raise `ConfigError`, about the first bad line, if no line is a JSON object. Accepts empty files.

    Reads up to the first object.
    """
    first_error = None
    for number, text in enumerate(lines, start=1):
        try:
            if text.strip():
                json_object("a line", text)
                return
        except ConfigError as error:
            first_error = first_error or ConfigError(
                f"{path}, line {number}: {error}; no line of the file is an object"
            )
    if first_error is not None:
        raise first_error


def check_policies(specs: str | None) -> None:
    """Raise `ConfigError` if one of the `specs`, separated by commas, is neither a cache policy nor a composition."""
    names = [] if specs is None else [spec.strip() for spec in specs.split(",")]
    policies = [name for name in names if name not in _POLICY_KEYWORDS]
    if not policies:
        return
    # Imported here, as policies need NumPy.
    from remask.policies import parse
    from remask.policies.bicache import DepthLookup
    from remask.policies.registry import file_and_class

    for spec in policies:
        file = file_and_class(spec)
        if file is None:
            parse(spec, None, lambda: DepthLookup({}))
        else:  # the file is run when the model is opened
            check_file("--cache", file[0])
