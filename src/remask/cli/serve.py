"""`remask serve`: an OpenAI-compatible server."""

import argparse
import gc
import importlib.util
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from remask.checks.fields import declared
from remask.checks.values import whole
from remask.cli.arguments.serve import KEY_VARIABLE, PRIORITY_KEY_VARIABLE
from remask.cli.banner import show_banner
from remask.cli.options import (
    engine_config,
    load_llm,
    object_option,
    sampling_option,
)
from remask.engine.config import AUTO
from remask.errors import ConfigError
from remask.llm import LLM
from remask.machine.log_format import FIELDS
from remask.sampling.defaults import overlaid
from remask.server.limits import ServerLimits
from remask.text.byte_tokenizer import byte_tokenizer

log = logging.getLogger(__name__)

MAX_PORT = 65535
_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "yaml")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the server."""
    check_extra(*_NEEDED)
    from remask.server.app import create_app
    from remask.server.config import ServerConfig
    from remask.server.run import Server, bind, url_of
    from remask.server.step_trace import StepTrace

    args.model = args.served or args.model
    config = ServerConfig(**server_settings(args))
    trace = None if args.profile_dir is None else StepTrace(Path(args.profile_dir), args.profile_steps)
    template = read_template(args.chat_template)
    cache_config, limits = object_option("--cache-config", args.cache_config), engine_config(args)
    # Loading a model may take minutes. If the port is taken, the error comes before that.
    with (
        bind(args.host, args.port) as listener,
        load_llm(args, args.cache or AUTO, cache_config, limits, spare_cores=1) as llm,
    ):
        if llm.tokenizer is None and args.load_format == "dummy":
            shape = llm.loaded.config
            stand_in = byte_tokenizer(shape.vocab, shape.mask_id, shape.stop_ids)
            llm.loaded = replace(llm.loaded, tokenizer=stand_in)
        if template is not None and llm.tokenizer is not None:
            llm.tokenizer.use_chat_template(template)
        app = create_app(llm, config, trace)
        url = url_of(listener)
        _announce(args, url, llm, config, trace is not None)
        where = f"API {url}/v1, playground {url}/ (Ctrl-C stops the server)"
        show_banner(args, llm, where, f"remask chat --base-url {url}/v1, or open the playground in a browser")
        # What is loaded stays. Without this every large body makes the collector look at all of it again, and the event
        # loop stands still meanwhile.
        gc.collect()
        gc.freeze()
        try:
            Server(app, listener).run()
        finally:
            gc.unfreeze()  # what stays for ever is reported as leaked when the process ends, by Triton among others
    return 0


def check_extra(*needed: str) -> None:
    """Raise `ConfigError` if packages of the `server` or the `ray` extra are missing."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extra = "ray" if missing == ["ray"] else "server"
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'remask[{extra}]'")


def server_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `ServerConfig`. `args.model` must be set. Raises `ConfigError` on a bad port."""
    whole("--port", args.port, low=0, high=MAX_PORT)
    return {
        "model_names": args.served_model_name or [args.model],
        "api_keys": [*(args.api_key or []), *filter(None, [os.environ.get(KEY_VARIABLE)])],
        "sampling": sampling_option(args),
        "seed": args.seed,
        "priority_keys": [*(args.priority_key or []), *filter(None, [os.environ.get(PRIORITY_KEY_VARIABLE)])],
        **{name: value for name, value in vars(args).items() if name in declared(ServerLimits)},
        "allowed_origins": args.allowed_origins,
        "allowed_hosts": [args.host, *args.allowed_hosts],
    }


def read_template(path: str | None) -> str | None:
    """Return the Jinja text of the file `path`; None without a path. Raises `ConfigError` if it cannot be read."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path!r}: {error}") from error


def _announce(args: argparse.Namespace, url: str, llm: LLM, config: Any, traced: bool) -> None:
    """Log one line with every setting, after `auto` was resolved."""
    settings = {
        "url": url,
        "model": args.model,
        "names": list(config.model_names),
        "device": str(llm.model.device),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cache": llm.cache_name,
        "cache_config": llm.cache_config,
        "sampling": overlaid(llm.sampling, config.sampling),
        "max_model_len": llm.engine.max_model_len,
        "engine": {name: getattr(llm.engine_config, name) for name in llm.engine_config.__dataclass_fields__},
        "seed": config.seed,
        **{name: getattr(config, name) for name in declared(ServerLimits)},
        "api_keys": len(config.api_keys),
        "priority_keys": len(config.priority_keys),
        "allowed_origins": list(config.allowed_origins),
        "allowed_hosts": list(config.allowed_hosts),
        "chat_template": args.chat_template
        or ("the model's" if llm.tokenizer and llm.tokenizer.has_chat_template else None),
        "profile_dir": args.profile_dir if traced else None,
        "profile_steps": args.profile_steps if traced else None,
    }
    log.info("remask serve: %s", json.dumps(settings), extra={FIELDS: settings})
