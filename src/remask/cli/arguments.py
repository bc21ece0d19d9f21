"""The options of the commands: one function for each.

Nothing here imports PyTorch or NumPy, so that help and errors of the command line appear at once.
"""

import argparse
from typing import Any, Final

from remask.checkpoint.settings import LoadSettings
from remask.checks import BUNDLED, QUANTIZATIONS, SMOLLM2
from remask.checks.fields import declared
from remask.cli import early
from remask.cli.commands import MODEL_EXAMPLES, STORE_EXAMPLES
from remask.cli.flags import add_flags
from remask.cli.options import KEY_VARIABLE, PRIORITY_KEY_VARIABLE
from remask.cli.parser import examples
from remask.cli.shared_options import (
    add_cache_options,
    add_config_option,
    add_default_options,
    add_engine_options,
    add_lora_modules,
    add_model_options,
    add_tensor_parallel,
    further_options,
)
from remask.deploy.settings import Scaling
from remask.engine.config import AUDIT_BOUND, AUTO
from remask.errors import ConfigError
from remask.server.config import IntakeLimits, ServerLimits

PROFILE_REQUESTS: Final = 128  # of `remask profile`, if neither --requests nor --input says how many


def generate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask generate`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt; its answer is printed as text")
    source.add_argument("--input", metavar="FILE", help="JSONL, one request a line ('-': standard input)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of --prompt")
    shape = further_options(parser).add_mutually_exclusive_group()
    shape.add_argument("--canvas", metavar="JSON", help="parts of --prompt's answer: fixed text, and holes to fill")
    shape.add_argument("--suffix", metavar="TEXT", help="text that follows --prompt's answer, which fills the gap")
    parser.add_argument("--output", metavar="FILE", help="JSONL answers (default: standard output)")
    add_config_option(parser)
    add_default_options(parser)
    further_options(parser).add_argument(
        "--trace", action="store_true", help="write which positions became final in which step"
    )
    add_model_options(parser)
    add_tensor_parallel(parser)
    add_lora_modules(parser)
    add_engine_options(parser)
    parser.set_defaults(early=early.check_generate)


def decide(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask decide`."""
    parser.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="JSON object with state or input, and questions ('-': standard input)",
    )
    add_cache_options(parser)
    add_model_options(parser)
    add_engine_options(parser)
    parser.set_defaults(early=early.check_decide)


def serve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask serve`."""
    _add_server_model(parser)
    server = add_server_options(parser, ServerLimits)
    server.add_argument(
        "--root-path",
        default="",
        metavar="PREFIX",
        help="prefix under which a proxy serves this server, such as /ai, whether it takes it off paths or not",
    )
    server.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="publish which pages of prompts are stored and removed, over ZeroMQ, as vLLM does: endpoint, "
        "replay_endpoint, topic; {} takes tcp://*:5557",
    )
    server.add_argument("--profile-dir", metavar="DIR", help="write a torch trace of engine steps here")
    server.add_argument("--profile-steps", type=int, default=20, metavar="N", help="steps of the trace (default 20)")
    parser.set_defaults(early=early.check_serve)


def _add_server_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that `serve` and `deploy` share: the model, its engine, and defaults of requests."""
    parser.allow_abbrev = False
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model, which it overrides")
    add_config_option(parser)
    add_model_options(parser, BUNDLED)
    add_tensor_parallel(parser)
    add_lora_modules(parser)
    add_engine_options(parser, store_budget_tokens=AUTO)  # a server has the device for itself
    add_answer_options(parser)


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for what a request leaves out, and for the names of the model."""
    group = parser.add_argument_group("answers")
    add_cache_options(group)
    group.add_argument(
        "--sampling",
        metavar="JSON",
        help="sampling parameters of requests that leave them out, on top of the model's own; "
        "'remask generate --help-fields' lists them",
    )
    group.add_argument(
        "--no-tools-by-form",
        dest="tools_by_form",
        action="store_false",
        help="refuse tools that the chat template does not tell of, unless a call must be made",
    )
    group.add_argument("--seed", type=int, help="makes the seeds of requests without one reproducible")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may give; answers carry the first (default MODEL)",
    )


def add_server_options(parser: argparse.ArgumentParser, limits: type[IntakeLimits]) -> Any:
    """Add the options for the address, the API keys and the declared `limits`. Returns their group."""
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
    group.add_argument("--open-metrics", action="store_true", help="answer /metrics without a key, as Prometheus asks")
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
    add_flags(group, limits)
    return group


def deploy(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask deploy`."""
    _add_server_model(parser)
    add_server_options(parser, IntakeLimits)
    parser.set_defaults(early=early.check_deploy)
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--ray-address", metavar="ADDRESS", help="address of a running Ray cluster (default: start one here)"
    )
    add_flags(fleet, Scaling, declared(Scaling).keys() - {"max_replicas"})
    fleet.add_argument(
        "--max-replicas", type=int, metavar="N", help="maximum number of replicas (default --min-replicas)"
    )


def chat(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask chat`."""
    in_process = argparse.ArgumentParser(add_help=False)
    for target in (in_process, parser):
        add_model_options(target, BUNDLED)
        add_engine_options(target)
        target.set_defaults(model=None)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model, which it overrides")
    add_config_option(parser)
    parser.add_argument("--base-url", metavar="URL", help="talk to this server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", metavar="KEY", help=f"for --base-url; also from {KEY_VARIABLE}")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_cache_options(parser, default=None)
    parser.add_argument(
        "--sampling", metavar="JSON", help="sampling parameters; 'remask generate --help-fields' lists them"
    )
    parser.set_defaults(in_process=in_process.parse_args([]), early=_check_chat)


def _check_chat(args: argparse.Namespace) -> None:
    """Set `args.model`, and check the options for a model in this process, which stay at defaults with `--base-url`.

    Raises `ConfigError` on one that does not, and the errors of `early.check` without `--base-url`.
    """
    args.model = args.positional_model or args.model
    if args.base_url is None:
        early.check(args)
        return
    for name, default in vars(args.in_process).items():
        if name not in ("model", "early") and getattr(args, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for a model in this process; leave out either {flag} or --base-url")


def demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask demo`."""
    parser.description = (
        "The model smollm2 answers eight questions about one page under no cache, all-layer reuse and bicache; each "
        "answer as it comes, marked right or wrong, and then one table."
    )
    add_flags(parser, LoadSettings, ("threads",))
    parser.set_defaults(model=SMOLLM2, depth_table=None, chat_template=None, early=early.check)


def profile(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask profile`."""
    parser.add_argument(
        "--input",
        "--prompts",
        metavar="FILE",
        help="JSONL of requests, as 'generate' takes it (default: questions of a bundled task)",
    )
    parser.add_argument("--system-prompt", metavar="FILE", help="file with a system prompt for all requests")
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"maximum number of requests (default {PROFILE_REQUESTS}, or all lines of --input)",
    )
    parser.add_argument(
        "--bound",
        type=float,
        default=AUDIT_BOUND,
        metavar="NATS",
        help="largest mean KL divergence in nats of first predictions, at the position that moves most "
        f"(default {AUDIT_BOUND})",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write the table to this file (default: the cache folder, for later starts)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests without --input (default 0)")
    add_model_options(parser, depths=False)


def quantize(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask quantize`."""
    parser.add_argument("--model", required=True, help="folder or hub id of a checkpoint, or a bundled model")
    parser.add_argument(
        "--quantization", required=True, metavar="|".join(QUANTIZATIONS), help="quantization of the matrices"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="new folder for the quantized checkpoint")
    parser.set_defaults(early=early.check_quantize)


def models(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask models`."""
    _add_memory(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", type=float, metavar="GB", help="free memory to fit into (default: this machine's)")


def pull(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask models pull`."""
    parser.set_defaults(early=early.check_pull)
    parser.add_argument("name", metavar="NAME", help="a name that 'remask models' lists, or a hub id")
    parser.add_argument(
        "--force", action="store_true", help="download a model that does not fit this machine's memory or disk"
    )


def inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remask inspect`."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    model = subjects.add_parser("model", help="family, shape, parameters, memory and policies, without loading weights")
    model.add_argument(
        "path", metavar="PATH", help="folder, GGUF file or hub id of a checkpoint, or the name of a preset"
    )
    _add_memory(model)
    add_flags(model, LoadSettings, ("adapter", "tensor_parallel"))
    model.add_argument("--json", action="store_true", help="print JSON")
    model.epilog = examples(*MODEL_EXAMPLES)
    model.set_defaults(early=early.check_inspect_model)
    store = subjects.add_parser(
        "store", help="pages, which requests use them, and what was shared, for a file of requests"
    )
    store.epilog = examples(*STORE_EXAMPLES)
    store.add_argument("--input", required=True, metavar="FILE", help="JSONL of requests, as 'generate' takes it")
    add_default_options(store)
    store.add_argument("--json", action="store_true", help="print JSON")
    add_model_options(store)
    add_engine_options(store)
