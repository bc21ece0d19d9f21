"""The cost of batch invariance: the same requests with `batch_invariant` and without it.

    python -m remask_lab.speed.invariance [--model llada-100m] [--caches none,reuse,block-dual] [--concurrency 4]

Both runs of a cache take turns. The command checks that the first request is answered alone, under `batch_invariant`,
as it was among the others.
"""

import argparse
import statistics
import sys
import time

import numpy as np

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.request import Request
from remask.errors import IntegrityError
from remask_lab.arguments.common import check_least
from remask_lab.speed.command import add_model_options, command_parser, open_random, print_report, run_command


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--caches", default="none,reuse,block-dual", help="policies, separated by commas")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=4, help="requests that run at a time")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt; half of them are shared")
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--block-length", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    add_model_options(parser, "llada-100m")
    args = parser.parse_args()
    check_least(args, requests=1, rounds=1)
    length = args.prompt + args.response
    plain, invariant = (
        EngineConfig(
            max_num_seqs=args.concurrency, max_model_len=length, store_budget_tokens=2 * length, batch_invariant=on
        )
        for on in (False, True)
    )
    llm = open_random(args, plain)
    results = [measure(llm, cache, args, plain, invariant) for cache in args.caches.split(",")]
    shape = ("model", "dtype", "requests", "concurrency", "prompt", "response", "block_length", "steps", "rounds")
    print_report(llm, **{name: getattr(args, name) for name in shape}, results=results)


def measure(
    llm: LLM, cache: str, args: argparse.Namespace, plain: EngineConfig, invariant: EngineConfig
) -> dict[str, object]:
    """The seconds of both runs under `cache`, and how many times as long the invariant one takes."""
    work = requests(llm, cache, args)
    run(llm, work[:1], plain)  # the first run of a shape makes kernels
    alone = run(llm, work[:1], invariant)[1]
    ratios, seconds, changed = [], [], 0
    for _ in range(args.rounds):
        usual, answers = run(llm, work, plain)
        ours, theirs = run(llm, work, invariant)
        if theirs[0] != alone[0]:
            raise IntegrityError(f"{cache}: with batch_invariant an answer depends on what else runs")
        changed = sum(one != other for one, other in zip(answers, theirs, strict=True))
        ratios.append(ours / usual)
        seconds.append((usual, ours))
    return {
        "cache": cache,
        "times_as_long": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "seconds": [statistics.median(column) for column in zip(*seconds, strict=True)],
        "answers_that_differ": changed,
    }


def requests(llm: LLM, cache: str, args: argparse.Namespace) -> list[Request]:
    """Requests with random prompts, whose first half is the same."""
    rng = np.random.default_rng(0)
    vocab, shared = llm.loaded.config.vocab, args.prompt // 2
    system = rng.integers(0, vocab, shared).tolist()
    params = SamplingParams(max_tokens=args.response, block_length=args.block_length, steps=args.steps, ignore_eos=True)
    policy = llm.policy(cache)
    return [
        Request(str(number), system + rng.integers(0, vocab, args.prompt - shared).tolist(), params, shared, policy)
        for number in range(args.requests)
    ]


def run(llm: LLM, work: list[Request], config: EngineConfig) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds that a new engine takes for all requests, and their answers in order."""
    engine = llm.new_engine(config)
    start = time.perf_counter()
    outputs = {output.id: output for output in llm.run(work, engine=engine, progress=False)}
    return time.perf_counter() - start, [outputs[item.id].token_ids for item in work]


if __name__ == "__main__":
    sys.exit(run_command(main))
