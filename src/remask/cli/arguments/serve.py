"""The options of `remask serve`, and those that `remask deploy` has too."""

import argparse
from typing import Any

from remask.checkpoint.bundled import BUNDLED
from remask.checks.fields import declared
from remask.checks.values import Whole
from remask.cli.arguments.options import add_engine_options, add_model_options, add_tensor_parallel
from remask.engine.config import AUTO
from remask.server.limits import IntakeLimits, ServerLimits

KEY_VARIABLE = "REMASK_API_KEY"
PRIORITY_KEY_VARIABLE = "REMASK_PRIORITY_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.allow_abbrev = False
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model, which it overrides")
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
        "--cache",
        default=AUTO,
        metavar="SPEC",
        help="policy, composition or FILE.py:CLASS of requests that name none; auto: bicache, or exact and none on "
        "block-causal and uniform models (default auto)",
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
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may give; answers carry the first (default MODEL)",
    )


def add_server_options(parser: argparse.ArgumentParser, limits: type[IntakeLimits]) -> Any:
    """Add the options for the address, the API keys and each of the declared `limits`. Returns their group."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default 8000)")
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
    group.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="web pages of these origins may call (CORS)"
    )
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
