"""The cost of serving over the engine alone, and the gain of `bicache` over `none` in served tokens a second.

    python -m remask_lab.speed.serving [--clients 8] [--requests 64] [--rounds 5] [--threads N] [--json FILE]

Runs the bundled model at prefix ratio 0.9. Two servers, one for each policy, run as processes on free ports of this
machine. The third contender is the engine alone in this process, with as many requests at a time and no HTTP. They take
turns in one run, each with an empty store at the start of its turn. The engine alone computes on as many threads as the
servers do. It has a further turn on PyTorch's default number of threads, so leave OMP_NUM_THREADS unset.

The server's overhead is measured twice. `closed_loop`: every client sends its next request when it has the answer to
the last one, so a slot is empty until that request arrives. `all_at_once`: all requests are sent at the start, so the
next one always waits, as it does for the engine alone. Each overhead is reported in parts (`remask_lab.speed.servers`).
The clients are in this process and share the machine with the servers, so the overhead includes theirs. At last, single
requests are sent twice: first the store does not hold their prefix, then it does.
"""

import asyncio
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.tasks.transit import TransitRequest, make_workload
from remask_lab.bench.workload import TRANSIT_SAMPLING
from remask_lab.load.load import Load, LoadRun, run_load
from remask_lab.load.mix import CHAT, HttpRequest
from remask_lab.load.target import Target, empty_store
from remask_lab.records.record import Record, about, write_record
from remask_lab.speed.command import add_model_options, command_parser, run_command
from remask_lab.speed.servers import Clocks, overhead, per_request, serving


@dataclass(frozen=True, slots=True)
class ServingRound:
    """A turn of each contender."""

    alone: Clocks
    all_cores: Clocks
    closed_loop: tuple[LoadRun, Clocks]
    all_at_once: tuple[LoadRun, Clocks]
    none: tuple[LoadRun, Clocks]


def main() -> None:
    """Measure, print one JSON object, and write the record where `--json` asks for it."""
    parser = command_parser(__doc__)
    parser.add_argument("--cache", default="bicache", help="the policy that is set against none")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64, help="in each turn")
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--rows", type=int, default=68, help="of the table in the shared prefix; more raise the ratio")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="that the model computes on (default: those of remask serve)")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    add_model_options(parser)
    args = parser.parse_args()
    cores = torch.get_num_threads()
    llm = LLM(
        "bundled-transit",
        cache=args.cache,
        dtype=args.dtype,
        device=args.device,
        engine=EngineConfig(max_num_seqs=args.clients),
        threads=args.threads,
        spare_cores=1,
    )
    threads = torch.get_num_threads()
    words = ["bundled-transit", "--dtype", args.dtype, "--device", args.device, "--threads", str(threads)]
    words += ["--max-num-seqs", str(args.clients), "--max-queue", str(args.requests), "--cache"]
    items = make_workload(args.requests, args.prefixes, 21, args.rows)
    engine = llm.new_engine()
    with serving(*words, args.cache) as ours, serving(*words, "none") as none:
        for target in (ours, none):
            served(target, items[: args.clients], args.clients)
        alone(llm, engine, items[: args.clients], threads)
        rounds = [
            ServingRound(
                alone(llm, engine, items, threads),
                alone(llm, engine, items, cores),
                served(ours, items, args.clients),
                served(ours, items, None),
                served(none, items, args.clients),
            )
            for _ in range(args.rounds)
        ]
        misses, hits = first_settled(ours, make_workload(12, 12, 22, args.rows))
    result = {
        "prefix_ratio": prefix_ratio(llm, items),
        "threads": threads,
        **gains(rounds),
        "server_overhead": {
            "closed_loop": parts([(each.alone, each.closed_loop[1]) for each in rounds]),
            "all_at_once": parts([(each.alone, each.all_at_once[1]) for each in rounds]),
        },
        "per_request": {
            "engine_alone": per_request([each.alone for each in rounds], args.requests),
            "closed_loop": per_request([each.closed_loop[1] for each in rounds], args.requests),
            "all_at_once": per_request([each.all_at_once[1] for each in rounds], args.requests),
        },
        "first_settled_block_miss_ms": 1e3 * statistics.median(misses),
        "first_settled_block_hit_ms": 1e3 * statistics.median(hits),
    }
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        write_record(args.json, Record("benchmarks serving", about(llm, seed=21, settings=settings), result))
    print(json.dumps(result, indent=2))


def gains(rounds: Sequence[ServingRound]) -> dict[str, object]:
    """Tokens a second of the contenders as medians over rounds, and the accuracy of the policies' answers."""
    ratios = [rate(each.closed_loop) / rate(each.none) for each in rounds]
    tokens = sum(outcome.output_tokens for outcome in rounds[0].closed_loop[0].outcomes)
    return {
        "served_gain_over_none": statistics.median(ratios),
        "served_gain_range": [min(ratios), max(ratios)],
        "engine_tok_s": statistics.median(tokens / each.alone.wall for each in rounds),
        "engine_tok_s_on_all_cores": statistics.median(tokens / each.all_cores.wall for each in rounds),
        "served_tok_s": statistics.median(rate(each.closed_loop) for each in rounds),
        "served_tok_s_all_at_once": statistics.median(rate(each.all_at_once) for each in rounds),
        "served_none_tok_s": statistics.median(rate(each.none) for each in rounds),
        "accuracy": {"cache": accuracy(rounds[-1].closed_loop[0]), "none": accuracy(rounds[-1].none[0])},
    }


def parts(pairs: Iterable[tuple[Clocks, Clocks]]) -> dict[str, object]:
    """The overhead and its parts as medians over rounds, and the range of the total."""
    turns = [overhead(alone, served) for alone, served in pairs]
    totals = [turn["total"] for turn in turns]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return {**medians, "range": [min(totals), max(totals)]}


def alone(llm: LLM, engine: Engine, items: Sequence[TransitRequest], threads: int) -> Clocks:
    """Run all requests without a server, with an empty store, on `threads` threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    policy = llm.policy(llm.cache, llm.cache_config)
    work = requests(llm, items)
    engine.store.drop()
    before = Clocks.of_engine(engine.stats)
    for request in work:
        engine.add(request.with_policy(policy))
    while engine.busy:
        engine.step()
    spent = Clocks.of_engine(engine.stats).since(before)
    torch.set_num_threads(usual)
    return spent


def served(target: Target, items: Sequence[TransitRequest], clients: int | None) -> tuple[LoadRun, Clocks]:
    """Run the same requests over HTTP, streamed, with an empty store at the start. None sends all of them at once."""
    empty_store(target.base_url)
    asks = [HttpRequest(CHAT, {"messages": item.messages}, item.answer) for item in items]
    before = Clocks.of_server(target)
    run = asyncio.run(run_load(target, asks, Load(max_concurrency=clients)))
    spent = Clocks.of_server(target).since(before)
    failed = [outcome.message for outcome in run.outcomes if outcome.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return run, replace(spent, wall=run.seconds)


def rate(turn: tuple[LoadRun, Clocks]) -> float:
    """Served response tokens a second."""
    run, _ = turn
    return sum(outcome.output_tokens for outcome in run.outcomes) / run.seconds


def accuracy(run: LoadRun) -> float:
    """The share of right answers."""
    return statistics.mean(bool(outcome.correct) for outcome in run.outcomes)


def first_settled(target: Target, items: Sequence[TransitRequest]) -> tuple[list[float], list[float]]:
    """Seconds until a client has the first block's text, on a miss and then on a hit of the same prefix.

    The bundled model's blocks take one step each, so the first text is the first block.
    """
    misses: list[float] = []
    hits: list[float] = []
    empty_store(target.base_url)
    for item in items:
        for times in (misses, hits):
            ask = HttpRequest(CHAT, {"messages": item.messages})
            (outcome,) = asyncio.run(run_load(target, [ask], Load())).outcomes
            assert outcome.ttft_s is not None
            assert bool(outcome.cached_tokens) is (times is hits)
            times.append(outcome.ttft_s)
    return misses, hits


def requests(llm: LLM, items: Sequence[TransitRequest]) -> list[Request]:
    """The requests that the server makes of the same messages."""
    assert llm.tokenizer is not None
    params = SamplingParams.from_mapping(TRANSIT_SAMPLING)
    return [
        Request(str(i), llm.tokenizer.apply_chat(item.messages), params, llm.tokenizer.shared_prefix(item.messages))
        for i, item in enumerate(items)
    ]


def prefix_ratio(llm: LLM, items: Sequence[TransitRequest]) -> float:
    """The mean share of the canvas that the shared prefix takes."""
    return statistics.mean(
        request.prefix_length / (len(request.prompt_token_ids) + request.params.max_tokens)
        for request in requests(llm, items)
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
