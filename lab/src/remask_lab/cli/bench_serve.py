"""`remask bench serve`: puts load on a running server."""

import argparse
import asyncio
import json
import os
from itertools import cycle, islice

from remask.cli.arguments import KEY_VARIABLE
from remask.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Put load on a server with OpenAI's API, streaming, and report under vLLM's keys. The prompts are the bundled "
        "model's task where the server has that model, GSM8K questions where it has a chat template, and else random "
        "tokens."
    )
    parser.add_argument(
        "--base-url", required=True, metavar="URL", help="URL of the server, such as http://127.0.0.1:8000"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"API key (default: the value of {KEY_VARIABLE})")
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: the first that the server lists)")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default="inf", metavar="R", help="arrivals a second, Poisson (default inf)"
    )
    load.add_argument("--max-concurrency", type=int, metavar="C", help="largest number of open requests")
    load.add_argument("--num-prompts", type=int, default=200, metavar="N", help="requests (default 200)")
    load.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests sent first, which do not count")
    load.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds without a byte until a request fails (default 600)",
    )
    load.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--dataset", default="auto", metavar="NAME", help="auto, tariff, relay, transit, gsm8k or random (default auto)"
    )
    prompts.add_argument("--prefixes", type=int, default=4, metavar="N", help="different shared prefixes (default 4)")
    prompts.add_argument(
        "--prefix-share", type=float, default=1.0, metavar="S", help="share of requests with a shared prefix"
    )
    prompts.add_argument("--prefix-tokens", type=int, metavar="P", help="length of a random prefix (default 230)")
    prompts.add_argument("--prompt-tokens", type=int, metavar="Q", help="random tokens after it (default 10)")
    prompts.add_argument("--max-tokens", type=int, metavar="G", help="response length (default: the server's)")
    prompts.add_argument("--ignore-eos", action="store_true", help="do not end responses at end tokens")
    prompts.add_argument("--extra-body", metavar="JSON", help='further fields of every body, such as {"cache": "none"}')
    parser.add_argument("--json", metavar="FILE", help="write the full result to FILE")
    parser.add_argument("--save-detailed", action="store_true", help="write the figures of every request too")


def run(args: argparse.Namespace) -> int:
    """Send the requests, print the summary, and write the JSON. Returns 1 where no request was answered."""
    # Imported here, so that --help needs no extra and no PyTorch.
    from remask.cli.options import check_folder, object_option
    from remask.machine.disk import write_whole
    from remask_lab.asked import check_least
    from remask_lab.load.load import Load, run_load
    from remask_lab.load.mix import PromptMix, find_target
    from remask_lab.load.result import detail, lines, summary

    check_folder("--json", args.json)
    if args.save_detailed and args.json is None:
        raise ConfigError("--save-detailed writes into the file that --json names; name one")
    check_least(args, num_warmups=0)
    lengths = {name: getattr(args, name) for name in ("prefix_tokens", "prompt_tokens")}
    own_lengths = {name: value for name, value in lengths.items() if value is not None}
    mix = PromptMix(args.dataset, args.num_prompts, args.prefixes, args.prefix_share, seed=args.seed, **own_lengths)
    load = Load(args.request_rate, args.max_concurrency, args.timeout, args.seed)
    extra = object_option("--extra-body", args.extra_body)
    if args.max_tokens is not None:
        extra["max_tokens"] = args.max_tokens
    if args.ignore_eos:
        extra["ignore_eos"] = True
    target = find_target(args.base_url, args.model, args.api_key or os.environ.get(KEY_VARIABLE))
    if own_lengths and mix.chosen(target) != "random":
        raise ConfigError("--prefix-tokens and --prompt-tokens shape random prompts; add --dataset random")
    requests = mix.draw(target)
    if args.num_warmups:
        few = Load(max_concurrency=args.max_concurrency, timeout_s=args.timeout)
        asyncio.run(run_load(target, list(islice(cycle(requests), args.num_warmups)), few, extra))
    done = asyncio.run(run_load(target, requests, load, extra, progress=args.progress))
    result = summary(target, mix, load, done)
    if args.json:
        content = {**result, **(detail(done) if args.save_detailed else {})}
        write_whole("the result", args.json, json.dumps(content, indent=2) + "\n")
    print("\n".join(lines(result)))
    return 0 if result["completed"] else 1
