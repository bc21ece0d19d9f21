"""The options of the laboratory's commands, each defined once. Nothing here imports PyTorch or NumPy."""

import argparse
from collections.abc import Mapping
from typing import Any

from remask.cli import early
from remask.cli.shared_options import (
    add_config_option,
    add_engine_options,
    add_model_options,
    add_tensor_parallel,
    further_options,
)
from remask_lab.bench.names import METRICS, PREFIX_TOKENS, PREFIXES, PROMPT_TOKENS, TASKS
from remask_lab.similarity.rule import ProfileSettings

ALL = "all"
REQUESTS = 200  # of a bench, where no number is asked for
TAU = ProfileSettings().tau
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cache": {"help": "cache policy or composition"},
    "cache_config": {"metavar": "JSON", "help": 'settings, as one object per policy: {"bicache": {}}'},
    "caches": {"metavar": "SPEC,...", "help": "policies, separated by commas"},
    "canvas": {"type": int, "metavar": "N", "help": "tokens of prompt and masks together"},
    "concurrency": {"type": int, "metavar": "C", "help": "requests that run at a time"},
    "csv": {"metavar": "FILE", "help": "write the table's rows to FILE, with all that they measure"},
    "detail": {
        "action": "store_true",
        "help": "also one request at a time, forwards, row-layers, cache ratio, staleness and extra memory",
    },
    "json": {"metavar": "FILE", "help": "write the full result to FILE"},
    "max_tokens": {"type": int, "metavar": "G", "help": "response length"},
    "metric": {
        "choices": METRICS,
        "help": "accuracy, however low; agreement: with 'none', and the loss of the reference answers (default: "
        "accuracy, unless the first questions are all answered wrongly, which is an error)",
    },
    "output": {"metavar": "FILE", "help": "where the numbers go, as JSON"},
    "page": {"metavar": "FILE", "help": "the same as an HTML page"},
    "plots": {"metavar": "FOLDER", "help": "where pictures go; made if it is not there"},
    "prefix_tokens": {"type": int, "metavar": "P", "help": "length of a random shared prefix"},
    "prefixes": {"type": int, "help": f"different shared prefixes (default {PREFIXES})"},
    "prompt_tokens": {"type": int, "metavar": "Q", "help": "random tokens after it"},
    "prompts": {"metavar": "FILE", "help": "JSONL of messages, prompt or prompt_token_ids a line"},
    "ratios": {"type": int, "nargs": "+", "metavar": "R", "help": "prefix ratios in percent"},
    "requests": {"type": int, "metavar": "N", "help": "questions"},
    "response": {"type": int, "metavar": "N", "help": "masks at the end of the canvas"},
    "rounds": {"type": int, "metavar": "K", "help": "turns of each policy"},
    "samples": {"type": int, "metavar": "N", "help": "requests per ratio"},
    "sampling": {"metavar": "JSON", "help": "sampling parameters, on top of the usual ones"},
    "seed": {"type": int, "help": "of the workload and of its requests"},
    "task": {"metavar": "NAME", "help": f"{', '.join(TASKS)} (default: the one that the model is made for)"},
    "task_settings": {"metavar": "JSON", "help": 'how hard it is: {"orders": 40, "kinds": ["plan", "lookup"]}'},
    "tau": {"type": float, "help": "similarity that a layer must exceed"},
}


def add(parser: Any, *names: str, **defaults: Any) -> None:
    """Add options by their names in `OPTIONS`: `names` without a default, the others with one, which ends their help.

    A default may also be a mapping of arguments of `add_argument` that replace those of the table.
    """
    for name in (*names, *defaults):
        default = defaults.get(name)
        arguments = {**OPTIONS.get(name, {}), **(default if isinstance(default, Mapping) else {"default": default})}
        if arguments.get("default") is None:
            arguments.pop("default", None)
        elif not isinstance(arguments["default"], tuple) and "action" not in arguments:
            arguments["help"] += f" (default {arguments['default']})"
        parser.add_argument(f"--{name.replace('_', '-')}", **arguments)


def add_workload(parser: Any, requests: Any, more: Any = None) -> None:
    """Add the options of a task and its requests: number, length and sampling. `requests` is the default number.

    `more` is the group of options that few people need, by default `parser`.
    """
    more = more or parser
    add(more, "task", "task_settings")
    add(parser, "max_tokens", "sampling", requests=requests)
    add(more, "prefixes", seed=2024)
    for name, default in (("prefix_tokens", PREFIX_TOKENS), ("prompt_tokens", PROMPT_TOKENS)):
        add(more, **{name: {"help": f"{OPTIONS[name]['help']} (default {default})"}})


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options of random requests of one shape, and of the model, for measurements of a machine."""
    group = parser.add_argument_group("requests, of random tokens")
    add(group, "sampling", max_tokens=128, prompt_tokens=64, seed={"default": 2024, "help": "of the tokens"})
    add(
        group,
        requests={"default": 4, "help": "run at a time"},
        prefix_tokens={"default": 192, "help": "that they share"},
    )
    add_model_options(parser, texts=False)


def bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of `remask bench`."""
    parser.description = (
        "Compare cache policies side by side: on --input, the own tasks of bundled models, GSM8K for a model with a "
        "chat template, or else random tokens. --prefix-match longest asks turns of conversations."
    )
    caches = (
        "policies, separated by commas (default: what suits the model's kind, as none,reuse,bicache or "
        "none,block-prefix,uniform-cache); 'all' for every one and their usual compositions, in detail"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input",
        metavar="FILE",
        help="JSONL of requests, as 'generate' takes it, without a cache; a line may have an answer",
    )
    add(parser, "metric", "json", caches={"help": caches})
    parser.add_argument(
        "--answers", action="store_true", help="print every response, the words marked that differ from the baseline's"
    )
    add(parser, "page")
    add_config_option(parser)
    more = further_options(parser)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt, as plain text")
    more.add_argument(
        "--variants",
        metavar="JSON",
        help='the rows, in place of --caches, compared with the first: ["none", {"cache": "reuse", "sampling": {}}]',
    )
    add(more, "cache_config", "detail", "csv", "plots", rounds=3)
    add(more, concurrency={"help": "requests that run at a time (default --max-num-seqs)"})
    more.add_argument("--depths", metavar="B,B,...", help="also bicache at these depths; 'all' for every one")
    more.add_argument(
        "--baseline-steps",
        metavar="N,...",
        help="also 'none' in fewer steps: a number, 'half' of them, or as 'few' as compute the work of each cache; "
        "'off' for none of them (default: 1,half on a bundled model's questions)",
    )
    more.add_argument("--without-prefix", action="store_true", help="also 'none' without the shared prefix")
    number = f"questions (default {REQUESTS}), or lines of --input (default all)"
    add_workload(parser, requests={"help": number}, more=more)
    add_model_options(parser)
    add_tensor_parallel(more)
    add_engine_options(parser)


def profile_ops(parser: argparse.ArgumentParser) -> None:
    """Add the options of `remask profile ops`."""
    parser.description = (
        "Run requests of random tokens together under a cache policy, and report the time of each operation: "
        "attention, MLP, projections, head, norms, sampling, packing and the rest."
    )
    add(parser, "json", cache="none", cache_config={"help": "settings of the policy"})
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="profile the first N steps (default 32)")
    add(parser, rounds={"default": 3, "help": "turns with and without instruments"})
    parser.add_argument("--plot", metavar="FILE", help="draw the roofline into this PNG file")
    add_shape(parser)


def verify(parser: argparse.ArgumentParser) -> None:
    """Add the options of `remask verify`."""
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a checkpoint in safetensors")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that the checkpoint brings, as the reference (default: transformers' own classes)",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what is asked (default: a question)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="length of the answer (default 32)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default float32)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    add(parser, "sampling")
    parser.add_argument("--hf-overrides", metavar="JSON", help="keys laid over those of MODEL's config.json")
    parser.set_defaults(early=early.check)
