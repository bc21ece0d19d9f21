"""The options of `remask chat`."""

import argparse

from remask.checkpoint.bundled import BUNDLED
from remask.cli.arguments.options import add_engine_options, add_model_options
from remask.cli.arguments.serve import KEY_VARIABLE
from remask.cli.early import check_named
from remask.engine.config import AUTO
from remask.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    in_process = argparse.ArgumentParser(add_help=False)
    for each in (in_process, parser):
        add_model_options(each, BUNDLED)
        add_engine_options(each)
        each.set_defaults(model=None, quantization=AUTO)
    parser.add_argument("named", nargs="?", metavar="MODEL", help="the same as --model, which it overrides")
    parser.add_argument("--base-url", metavar="URL", help="talk to this server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", metavar="KEY", help=f"for --base-url; also from {KEY_VARIABLE}")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--cache", metavar="SPEC", help="policy (default: the one that 'remask serve' chooses)")
    parser.add_argument("--cache-config", metavar="JSON", help="settings of the policy")
    parser.add_argument(
        "--sampling", metavar="JSON", help="sampling parameters; 'remask generate --help-fields' lists them"
    )
    parser.set_defaults(in_process=in_process.parse_args([]), early=_check)


def _check(args: argparse.Namespace) -> None:
    """Check what is named for a model in this process. A server knows its own policies, and needs none of the options.

    Raises `ConfigError`.
    """
    args.model = args.named or args.model
    if args.base_url is None:
        check_named(args)
        return
    for name, default in vars(args.in_process).items():
        if name not in ("model", "early") and getattr(args, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for a model in this process; leave out either {flag} or --base-url")
