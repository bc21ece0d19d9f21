"""What serving costs over the engine alone, and what `bicache` gains over `none` in served tokens a second.

    python -m benchmarks.serving [--clients 8] [--requests 64] [--rounds 5] [--json FILE]

Uses the bundled model, at prefix ratio 0.9. Two servers, one for each policy, run as processes on free ports of this
machine; a third contender is the engine alone in this process, with as many requests at a time and no HTTP. They take
turns in one run, each with an empty store at the start of its turn. The clients are in this process and share the
machine with the servers, so the overhead has their part in it. Last, single requests are sent whose prefix the store
does not hold, and then holds.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from remask import LLM, EngineConfig, SamplingParams
from remask.core.request import Request
from remask.evals.machine import commit, machine
from remask.evals.serving.load import Load, Run, put
from remask.evals.serving.mix import CHAT, Ask
from remask.evals.serving.target import Target, find_target
from remask.evals.workload import BUNDLED_SAMPLING
from remask.llm import Work
from remask.tasks.transit import TransitRequest, make_workload

START = "import sys; from remask.cli import main; sys.exit(main())"
START_S = 120


def main() -> None:
    """Measure, print one JSON object, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", default="bicache", help="the policy that is set against none")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64, help="in each turn")
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--rows", type=int, default=68, help="of the table in the shared prefix; more raise the ratio")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    args = parser.parse_args()
    limits = EngineConfig(max_num_seqs=args.clients)
    llm = LLM("bundled", cache=args.cache, dtype=args.dtype, device=args.device, engine=limits)
    items = make_workload(args.requests, args.prefixes, 21, args.rows)
    fresh = make_workload(12, 12, 22, args.rows)
    with serving(args, args.cache) as ours, serving(args, "none") as none:
        for target in (ours, none):
            served(target, items[: args.clients], args.clients)
        alone(llm, items[: args.clients])
        turns = [
            (alone(llm, items), served(ours, items, args.clients), served(none, items, args.clients))
            for _ in range(args.rounds)
        ]
        misses, hits = first_settled(ours, fresh)
    gains = [rate(ours) / rate(none) for _, ours, none in turns]
    overheads = [1 - rate(ours) / engine for engine, ours, _ in turns]
    result = {
        "machine": machine(llm),
        "commit": commit(),
        "cache": args.cache,
        "clients": args.clients,
        "requests": args.requests,
        "rounds": args.rounds,
        "prefix_ratio": prefix_ratio(llm, items),
        "served_gain_over_none": statistics.median(gains),
        "served_gain_range": [min(gains), max(gains)],
        "server_overhead": statistics.median(overheads),
        "server_overhead_range": [min(overheads), max(overheads)],
        "engine_tok_s": statistics.median(engine for engine, _, _ in turns),
        "served_tok_s": statistics.median(rate(ours) for _, ours, _ in turns),
        "served_none_tok_s": statistics.median(rate(none) for _, _, none in turns),
        "accuracy": {"cache": accuracy(turns[-1][1]), "none": accuracy(turns[-1][2])},
        "first_settled_block_miss_ms": 1e3 * statistics.median(misses),
        "first_settled_block_hit_ms": 1e3 * statistics.median(hits),
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


@contextmanager
def serving(args: argparse.Namespace, cache: str) -> Iterator[Target]:
    """A server of its own process, until the block ends."""
    words = ["serve", "bundled", "--port", "0", "--cache", cache, "--max-num-seqs", str(args.clients)]
    words += ["--dtype", args.dtype, "--device", args.device]
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen([sys.executable, "-c", START, *words], stderr=told)
        try:
            yield find_target(_url(process, told))
        finally:
            process.terminate()
            process.wait(60)


def _url(process: "subprocess.Popen[bytes]", told: Any) -> str:
    """Where the server listens, once it does."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        told.seek(0)
        found = re.search(r"running on (http://\S+:\d+)", told.read())
        if found is not None:
            return found.group(1)
        time.sleep(0.05)
    told.seek(0)
    raise RuntimeError(f"the server did not start:\n{told.read()}")


def alone(llm: LLM, items: Sequence[TransitRequest]) -> float:
    """Response tokens a second of an engine with an empty store, without a server."""
    policy = llm.policy(llm.cache, llm.cache_config)
    engine = llm.new_engine()
    work = [Work(request, policy) for request in requests(llm, items)]
    start = time.perf_counter()
    tokens = sum(output.usage.completion_tokens for output in llm.run(work, engine=engine, progress=False))
    return tokens / (time.perf_counter() - start)


def served(target: Target, items: Sequence[TransitRequest], clients: int) -> Run:
    """The same requests over HTTP, streamed, with an empty store at the start."""
    httpx.delete(f"{target.base_url}/v1/cache").raise_for_status()
    asks = [Ask(CHAT, {"messages": item.messages}, item.answer) for item in items]
    run = asyncio.run(put(target, asks, Load(max_concurrency=clients)))
    failed = [outcome.message for outcome in run.outcomes if outcome.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return run


def rate(run: Run) -> float:
    """Served response tokens a second."""
    return sum(outcome.output_tokens for outcome in run.outcomes) / run.seconds


def accuracy(run: Run) -> float:
    """Share of right answers."""
    return statistics.mean(bool(outcome.correct) for outcome in run.outcomes)


def first_settled(target: Target, items: Sequence[TransitRequest]) -> tuple[list[float], list[float]]:
    """Seconds until a client had the first block's text, on a miss and then on a hit of the same prefix.

    The bundled model's blocks take one step each, so the first text is the first block.
    """
    misses: list[float] = []
    hits: list[float] = []
    httpx.delete(f"{target.base_url}/v1/cache").raise_for_status()
    for item in items:
        for times in (misses, hits):
            ask = Ask(CHAT, {"messages": item.messages})
            (outcome,) = asyncio.run(put(target, [ask], Load())).outcomes
            assert outcome.ttft_s is not None
            assert bool(outcome.cached_tokens) is (times is hits)
            times.append(outcome.ttft_s)
    return misses, hits


def requests(llm: LLM, items: Sequence[TransitRequest]) -> list[Request]:
    """What the server makes of the same messages."""
    assert llm.tokenizer is not None
    params = SamplingParams.from_mapping(BUNDLED_SAMPLING)
    return [
        Request(str(i), llm.tokenizer.apply_chat(item.messages), params, llm.tokenizer.shared_prefix(item.messages))
        for i, item in enumerate(items)
    ]


def prefix_ratio(llm: LLM, items: Sequence[TransitRequest]) -> float:
    """Mean share of the canvas that the shared prefix takes."""
    return statistics.mean(
        request.prefix_length / (len(request.prompt_token_ids) + request.params.max_tokens)
        for request in requests(llm, items)
    )


if __name__ == "__main__":
    main()
