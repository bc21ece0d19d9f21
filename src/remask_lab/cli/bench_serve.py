"""`remask bench serve`: puts load on a running server."""

import argparse
import asyncio
import json
import os

from remask.cli.arguments.serve import KEY_VARIABLE
from remask.cli.options import check_folder, object_option
from remask.errors import ConfigError
from remask.machine.disk import write_whole
from remask_lab.arguments.common import check_least


def run(args: argparse.Namespace) -> int:
    """Send the requests, print the summary, and write the JSON. Returns 1 where no request was answered."""
    # Imported here, so that --help needs no extra.
    from remask_lab.load.load import Load, run_load
    from remask_lab.load.mix import PromptMix
    from remask_lab.load.result import detail, lines, summary
    from remask_lab.load.target import find_target

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
        asyncio.run(run_load(target, requests[: args.num_warmups], few, extra))
    done = asyncio.run(run_load(target, requests, load, extra, progress=args.progress))
    result = summary(target, mix, load, done)
    if args.json:
        content = {**result, **(detail(done) if args.save_detailed else {})}
        write_whole("the result", args.json, json.dumps(content, indent=2) + "\n")
    print("\n".join(lines(result)))
    return 0 if result["completed"] else 1
