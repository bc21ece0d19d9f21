"""Options that say which requests with shared prefixes a measurement runs, and those requests."""

import argparse
from dataclasses import asdict
from typing import Any

from remask.cli.options import object_option
from remask.core.sampling import SamplingParams
from remask.errors import ConfigError
from remask.evals.workload import (
    BUNDLED_SAMPLING,
    GSM8K_SAMPLING,
    Workload,
    bundled_workload,
    gsm8k_workload,
    is_bundled,
    random_workload,
    reads_chats,
)
from remask.llm import LLM

PREFIXES = 4
PREFIX_TOKENS, PROMPT_TOKENS = 230, 10
RANDOM_ONLY = "--prefix-tokens and --prompt-tokens shape random workloads; the bundled model has a task"


def add_workload_options(parser: Any, requests: int) -> None:
    """How many requests, of what length, and how they are denoised; `requests` is the default number."""
    parser.add_argument("--requests", type=int, default=requests, metavar="N", help=f"default {requests}")
    parser.add_argument("--prefixes", type=int, help=f"different shared prefixes (default {PREFIXES})")
    parser.add_argument(
        "--prefix-tokens", type=int, metavar="P", help=f"length of a random shared prefix (default {PREFIX_TOKENS})"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="Q", help=f"random tokens after it (default {PROMPT_TOKENS})"
    )
    parser.add_argument("--max-tokens", type=int, metavar="G", help="response length")
    parser.add_argument("--sampling", metavar="JSON", help="further sampling parameters")
    parser.add_argument("--seed", type=int, default=2024, help="of the workload (default 2024)")


def shared_workload(llm: LLM, args: argparse.Namespace) -> Workload:
    """The bundled model's task, GSM8K for a model that takes chats, else random tokens, as `args` shape them.

    Raises `ConfigError` on numbers below 1, and on lengths of random tokens for a model that has a task.
    """
    for name in ("requests", "prefixes", "prefix_tokens", "prompt_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    own = object_option("--sampling", args.sampling)
    lengths = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    prefixes = PREFIXES if args.prefixes is None else args.prefixes
    shaped = args.prefix_tokens is not None or args.prompt_tokens is not None
    if is_bundled(llm):
        if shaped:
            raise ConfigError(
                "--prefix-tokens and --prompt-tokens shape random workloads; the bundled model has a task"
            )
        params = SamplingParams.from_mapping({**BUNDLED_SAMPLING, **lengths, **own})
        return bundled_workload(llm, args.requests, prefixes, args.seed, params)
    if reads_chats(llm) and not shaped:
        params = SamplingParams.from_mapping({**GSM8K_SAMPLING, **lengths, **own})
        return gsm8k_workload(llm, args.requests, prefixes, args.seed, params)
    # Random tokens carry no meaning, so an end token among them must not shorten the work.
    params = SamplingParams.from_mapping({"max_tokens": 16, "ignore_eos": True, **lengths, **own})
    prefix, prompt = args.prefix_tokens or PREFIX_TOKENS, args.prompt_tokens or PROMPT_TOKENS
    return random_workload(llm, args.requests, prefixes, args.seed, params, prefix, prompt)


def described(workload: Workload) -> dict[str, Any]:
    """What was asked, for a record's settings."""
    params = asdict(workload.tasks[0].request.params)
    return {
        "name": workload.name,
        "requests": len(workload.tasks),
        "prefixes": workload.prefixes,
        "prefix_ratio": round(workload.prefix_ratio, 3),
        "sampling": {name: value for name, value in params.items() if value is not None},
    }
