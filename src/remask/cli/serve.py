"""`remask serve`: an OpenAI-compatible server."""

import argparse
import gc
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from remask.checkpoint.source import BUNDLED
from remask.checks.fields import declared
from remask.checks.values import Whole, whole
from remask.cli.options import (
    add_engine_options,
    add_model_options,
    add_tensor_parallel,
    engine_config,
    object_option,
    open_llm,
    sampling_option,
)
from remask.errors import ConfigError
from remask.llm import AUTO, LLM
from remask.sampling.defaults import overlaid
from remask.server.limits import RequestLimits, ServerLimits

log = logging.getLogger(__name__)

KEY_VARIABLE = "REMASK_API_KEY"
PRIORITY_KEY_VARIABLE = "REMASK_PRIORITY_KEY"
MAX_PORT = 65535
_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.allow_abbrev = False
    parser.add_argument("served", nargs="?", metavar="MODEL", help="as --model, and wins over it")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON object of these flags; the command line wins")
    add_model_options(parser, BUNDLED)
    add_tensor_parallel(parser)
    add_engine_options(parser)
    parser.set_defaults(store_budget_tokens=AUTO)  # a server's engine is alone on its device
    add_answer_options(parser)
    server = add_server_options(parser, ServerLimits)
    server.add_argument("--profile-dir", metavar="DIR", help="write a torch trace of engine steps here")
    server.add_argument("--profile-steps", type=int, default=20, metavar="N", help="steps of the trace (default 20)")


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that give values to what a request leaves out."""
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--cache", default=AUTO, metavar="SPEC", help="policy or composition (auto: bicache where defined)"
    )
    group.add_argument("--cache-config", metavar="JSON", help="settings of the policy")
    group.add_argument(
        "--sampling",
        metavar="JSON",
        help="sampling parameters of requests that leave them out, on top of the model's own; "
        "'remask generate --help-fields' lists them",
    )
    group.add_argument("--seed", type=int, help="makes the seeds of requests without one reproducible")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the model's own")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names of the model (default MODEL)")


def add_server_options(parser: argparse.ArgumentParser, limits: type[RequestLimits]) -> Any:
    """Add the options for the address, the API keys and each of the declared `limits`. Returns their group."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help=f"accept only requests with one of these keys; also from {KEY_VARIABLE}",
    )
    group.add_argument(
        "--priority-key",
        nargs="+",
        metavar="KEY",
        help=f"as --api-key; only these keys may have negative priorities; also from {PRIORITY_KEY_VARIABLE}",
    )
    group.add_argument("--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="web pages that may call")
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names under which a server without keys may be called, beside localhost, --host and addresses; * is any",
    )
    for name, limit in declared(limits).items():
        number, metavar = (int, "N") if isinstance(limit.values, Whole) else (float, "S")
        usual = "" if limit.default is None else f" (default {str(limit.default).removesuffix('.0')})"
        flag, text = "--" + name.replace("_", "-"), f"{limit.meaning.removesuffix('.')}{usual}"
        group.add_argument(flag, type=number, default=limit.default, metavar=metavar, help=text)
    return group


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the server."""
    check_extra(*_NEEDED)
    from remask.server.app import create_app
    from remask.server.config import ServerConfig
    from remask.server.run import Server, bind, url_of
    from remask.server.trace import StepTrace

    args.model = args.served or args.model
    config = ServerConfig(**server_settings(args))
    trace = None if args.profile_dir is None else StepTrace(Path(args.profile_dir), args.profile_steps)
    template = read_template(args.chat_template)
    cache_config, limits = object_option("--cache-config", args.cache_config), engine_config(args)
    # Loading a model may take minutes. If the port is taken, the error comes before that.
    with (
        bind(args.host, args.port) as listener,
        open_llm(args, args.cache or AUTO, cache_config, limits, spare_cores=1) as llm,
    ):
        if template is not None and llm.tokenizer is not None:
            llm.tokenizer.use_chat_template(template)
        app = create_app(llm, config, trace)
        _announce(args, url_of(listener), llm, config, trace is not None)
        # What is loaded stays. Without this every large body makes the collector look at all of it again, and the event
        # loop stands still meanwhile.
        gc.collect()
        gc.freeze()
        Server(app, listener).run()
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
    log.info("remask serve: %s", json.dumps(settings))
