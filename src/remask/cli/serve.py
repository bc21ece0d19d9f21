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

from remask.cli.options import (
    add_engine_options,
    add_model_options,
    engine_config,
    object_option,
    open_llm,
    sampling_option,
)
from remask.core.checks import whole
from remask.errors import ConfigError
from remask.llm import AUTO, LLM
from remask.models.source import BUNDLED

log = logging.getLogger(__name__)

KEY_VARIABLE = "REMASK_API_KEY"
PRIORITY_KEY_VARIABLE = "REMASK_PRIORITY_KEY"
_LIMITS = (
    "max_queue",
    "drain_timeout",
    "max_body_bytes",
    "max_messages",
    "max_choices",
    "max_prompt_chars",
    "max_request_chars",
    "text_workers",
    "header_timeout",
    "body_timeout",
    "keep_alive_timeout",
    "max_connections",
    "max_priority",
    "step_limit",
)
MAX_PORT = 65535
_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.allow_abbrev = False
    parser.add_argument("served", nargs="?", metavar="MODEL", help="as --model, and wins over it")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON object of these flags; the command line wins")
    add_model_options(parser, BUNDLED)
    add_engine_options(parser)
    add_answer_options(parser)
    server = add_server_options(parser)
    server.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads that the model computes on (default: all cores but one)"
    )
    server.add_argument("--profile-dir", metavar="DIR", help="write a torch trace of engine steps here")
    server.add_argument("--profile-steps", type=int, default=20, metavar="N", help="steps of the trace (default 20)")


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """What requests get that leave it out."""
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--cache", default=AUTO, metavar="SPEC", help="policy or composition (auto: bicache where defined)"
    )
    group.add_argument("--cache-config", metavar="JSON", help="settings of the policy")
    group.add_argument(
        "--sampling",
        metavar="JSON",
        help="sampling parameters of requests that leave them out; 'remask generate --help-fields' lists them",
    )
    group.add_argument("--seed", type=int, help="makes the seeds of requests without one reproducible")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the model's own")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names of the model (default MODEL)")


def add_server_options(parser: argparse.ArgumentParser) -> Any:
    """Where to listen, whom to let in, and how much to take. Returns the group."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    group.add_argument(
        "--api-key", nargs="+", metavar="KEY", help=f"let in who sends one of these; also from {KEY_VARIABLE}"
    )
    group.add_argument("--max-queue", type=int, default=256, help="requests that may wait (default 256)")
    group.add_argument("--max-body-bytes", type=int, default=4 << 20, help="longest request body (default 4 MiB)")
    group.add_argument("--max-messages", type=int, default=1024, help="most messages a conversation (default 1024)")
    group.add_argument("--max-choices", type=int, default=128, help="most answers: n times the prompts (default 128)")
    group.add_argument(
        "--max-prompt-chars",
        type=int,
        metavar="N",
        help="longest prompt or conversation (default 64 a token of canvas)",
    )
    group.add_argument(
        "--max-request-chars", type=int, metavar="N", help="all prompts of a request (default 4 longest prompts)"
    )
    group.add_argument("--text-workers", type=int, default=4, metavar="N", help="threads that tokenize (default 4)")
    group.add_argument("--header-timeout", type=float, default=10.0, metavar="S", help="for a request's headers")
    group.add_argument("--body-timeout", type=float, default=60.0, metavar="S", help="for a request's body")
    group.add_argument("--keep-alive-timeout", type=float, default=5.0, metavar="S", help="of idle connections")
    group.add_argument("--max-connections", type=int, default=1024, metavar="N", help="at a time (default 1024)")
    group.add_argument(
        "--max-priority", type=int, default=0, metavar="N", help="requests may have priorities from -N up (default 0)"
    )
    group.add_argument(
        "--priority-key",
        nargs="+",
        metavar="KEY",
        help=f"as --api-key; only these keys may have negative priorities; also from {PRIORITY_KEY_VARIABLE}",
    )
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="for accepted requests at the end"
    )
    group.add_argument(
        "--step-limit", type=float, default=30.0, metavar="S", help="a longer step fails /health (default 30)"
    )
    group.add_argument("--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="web pages that may call")
    return group


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    check_extra(*_NEEDED)
    from remask.server.app import create_app
    from remask.server.config import ServerConfig
    from remask.server.run import Server, bind, url_of
    from remask.server.trace import StepTrace

    args.model = args.served or args.model
    config = ServerConfig(**server_settings(args))
    whole("threads", args.threads, low=1, optional=True)
    torch.set_num_threads(args.threads or default_threads())
    trace = None if args.profile_dir is None else StepTrace(Path(args.profile_dir), args.profile_steps)
    template = read_template(args.chat_template)
    cache_config, limits = object_option("--cache-config", args.cache_config), engine_config(args)
    # Loading a model may take minutes: a port that is taken is told before.
    with bind(args.host, args.port) as listener:
        llm = open_llm(args, args.cache or AUTO, cache_config, limits)
        if template is not None and llm.tokenizer is not None:
            llm.tokenizer.use_chat_template(template)
        app = create_app(llm, config, trace)
        _announce(args, url_of(listener), llm, config, trace is not None)
        # What is loaded stays. Without this every large body makes the collector look at all of it, again and again,
        # and the event loop stands still so long.
        gc.collect()
        gc.freeze()
        Server(app, listener).run()
    return 0


def default_threads() -> int:
    """Threads for a server's model: one a core, but for one core, which is left to HTTP.

    Threads of the model that wait for each other spin, and hold up whoever shares their cores. A lower number that
    PyTorch was told of, as by OMP_NUM_THREADS, is kept.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(torch.get_num_threads(), max(1, cores - 1))


def check_extra(*needed: str) -> None:
    """Raise `ConfigError` where packages of the `server` or the `ray` extra are missing."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extra = "ray" if missing == ["ray"] else "server"
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'remask[{extra}]'")


def server_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerConfig` as given; `args.model` is known. Raises `ConfigError` on a port that is none."""
    whole("--port", args.port, low=0, high=MAX_PORT)
    return {
        "model_names": args.served_model_name or [args.model],
        "api_keys": [*(args.api_key or []), *filter(None, [os.environ.get(KEY_VARIABLE)])],
        "sampling": sampling_option(args),
        "seed": args.seed,
        "priority_keys": [*(args.priority_key or []), *filter(None, [os.environ.get(PRIORITY_KEY_VARIABLE)])],
        **{name: getattr(args, name) for name in _LIMITS},
        "allowed_origins": args.allowed_origins,
    }


def read_template(path: str | None) -> str | None:
    """The Jinja text in the file that `--chat-template` names, if it names one."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path!r}: {error}") from error


def _announce(args: argparse.Namespace, url: str, llm: LLM, config: Any, traced: bool) -> None:
    """One line with every choice, what `auto` came to included."""
    told = {
        "url": url,
        "model": args.model,
        "names": list(config.model_names),
        "device": str(llm.model.device),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cache": llm.cache_name,
        "cache_config": llm.cache_config,
        "sampling": dict(config.sampling),
        "max_model_len": llm.engine.max_model_len,
        "engine": {name: getattr(llm.engine_config, name) for name in llm.engine_config.__dataclass_fields__},
        "seed": config.seed,
        **{name: getattr(config, name) for name in _LIMITS},
        "api_keys": len(config.api_keys),
        "priority_keys": len(config.priority_keys),
        "allowed_origins": list(config.allowed_origins),
        "chat_template": args.chat_template
        or ("the model's" if llm.tokenizer and llm.tokenizer.has_chat_template else None),
        "profile_dir": args.profile_dir if traced else None,
        "profile_steps": args.profile_steps if traced else None,
    }
    log.info("remask serve: %s", json.dumps(told))
