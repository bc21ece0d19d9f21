"""Servers in processes of their own: what serving costs over the engine alone, and what a cache gains there."""

import argparse
import asyncio
import os
import re
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.engine import Engine
from remask.engine.member import EngineStats
from remask.engine.request import Request
from remask.tasks import transit
from remask.tasks.transit import TransitRequest, make_workload
from remask_lab.load.load import Load, LoadRun, run_load
from remask_lab.load.mix import CHAT, HttpRequest, Target, empty_store, find_target, read_metrics
from remask_lab.records.record import Record, about
from remask_lab.speed.command import REMASK

START_S, STOP_S = 300, 90
_SAMPLE = re.compile(r"^(?:remask:)?(\w+?)(?:\{model_name=[^}]*\})? (\S+)$", re.MULTILINE)


@contextmanager
def process(words: Sequence[str], pattern: str, **environment: str) -> Iterator[str]:
    """Run a process until the block ends, then stop it by SIGTERM. Yields the first group of `pattern` in its output.

    Raises `RuntimeError` where the process ends earlier, or with another status than that of a stop.
    """
    lines: list[str] = []
    env = {**os.environ, **environment}
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    assert child.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(child.stdout,))
    reader.start()
    try:
        yield _awaited(child, lines, pattern)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            status = child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        reader.join()
        child.stdout.close()
    if status not in (0, -signal.SIGTERM):
        raise RuntimeError(f"{words[:4]} ended with status {status}:\n{''.join(lines[-50:])}")


def _awaited(child: "subprocess.Popen[str]", lines: list[str], pattern: str) -> str:
    end = time.monotonic() + START_S
    while child.poll() is None and time.monotonic() < end:
        found = re.search(pattern, "".join(list(lines)))
        if found is not None:
            return found.group(1)
        time.sleep(0.02)
    state = f"after {START_S} s" if child.poll() is None else f"and the process ended with status {child.returncode}"
    raise RuntimeError(f"the output has no {pattern!r} {state}:\n{''.join(list(lines))}")


def free_port() -> int:
    """Returns a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def server(*words: str) -> Iterator[Target]:
    """Run `remask serve` with these words on a free port, until the block ends."""
    with process([*REMASK, "serve", "--port", "0", *words], r"running on (http://\S+:\d+)") as url:
        yield find_target(url)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Readings of counters that only grow. Times are in seconds.

    Attributes:
        wall: the clock of this process.
        steps: the number of steps of the engine.
        in_steps: the time of the engine's thread in these steps.
        engine: the CPU time of that thread in them. For the rest it waited: for the interpreter's lock, a core, helper
            threads, or a device.
        server: the server process' other CPU time: HTTP, JSON, tokenizing, and helper threads of the model.
        client: the CPU time of this process.
    """

    wall: float
    steps: float
    in_steps: float
    engine: float
    server: float
    client: float

    @classmethod
    def of_engine(cls, stats: EngineStats) -> "Clocks":
        """Read the clocks of an engine in this process, without a server."""
        return cls(time.perf_counter(), stats.steps, stats.step_seconds, stats.step_cpu_seconds, 0.0, 0.0)

    @classmethod
    def of_server(cls, target: Target) -> "Clocks":
        """Read the metrics of a server and the clocks of this process."""
        found = {name: float(value) for name, value in _SAMPLE.findall(read_metrics(target))}
        engine = found["engine_step_cpu_seconds_total"]
        return cls(
            wall=time.perf_counter(),
            steps=found["engine_steps_total"],
            in_steps=found["engine_step_seconds_total"],
            engine=engine,
            server=found["process_cpu_seconds_total"] - engine,
            client=time.process_time(),
        )

    def since(self, before: "Clocks") -> "Clocks":
        """The difference between two readings."""
        return Clocks(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


def overhead(alone: Clocks, served: Clocks) -> dict[str, float]:
    """The time that serving adds to that of an engine alone with the same requests, as shares of the time served.

    `total` is the sum of the other three. The engine's thread computes more slowly, because it shares caches. It waits
    more in steps, for the interpreter's lock and for cores. And it spends time between steps, where it accepts requests
    or has none.
    """

    def lost(of: Any) -> float:
        return float(of(served) - of(alone)) / served.wall

    return {
        "total": lost(lambda clocks: clocks.wall),
        "computing_slower": lost(lambda clocks: clocks.engine),
        "waiting_in_steps": lost(lambda clocks: clocks.in_steps - clocks.engine),
        "between_steps": lost(lambda clocks: clocks.wall - clocks.in_steps),
    }


def per_request(spent: Sequence[Clocks], requests: int) -> dict[str, float]:
    """The median over turns of the steps and the milliseconds that each of `requests` took."""
    medians: dict[str, float] = {}
    for each in fields(Clocks):
        median = statistics.median(getattr(clocks, each.name) / requests for clocks in spent)
        medians |= {"steps": median} if each.name == "steps" else {f"{each.name}_ms": 1e3 * median}
    return medians


@dataclass(frozen=True, slots=True)
class ServingRound:
    """A turn of each contender."""

    alone: Clocks
    all_cores: Clocks
    closed_loop: tuple[LoadRun, Clocks]
    all_at_once: tuple[LoadRun, Clocks]
    none: tuple[LoadRun, Clocks]


def serving(args: argparse.Namespace) -> Record:
    """The cost of serving over the engine alone, and the gain of `bicache` over `none` in served tokens a second.

    Runs the bundled model at prefix ratio 0.9. Two servers, one for each policy, run as processes on free ports of this
    machine. The third contender is the engine alone in this process, with as many requests at a time and no HTTP. They
    take turns in one run, each with an empty store at the start of its turn. The engine alone computes on as many
    threads as the servers do. It has a further turn on PyTorch's default number of threads, so leave OMP_NUM_THREADS
    unset.

    The server's overhead is measured twice. `closed_loop`: every client sends its next request when it has the answer
    to the last one, so a slot is empty until that request arrives. `all_at_once`: all requests are sent at the start,
    so the next one always waits, as it does for the engine alone. Each overhead is reported in parts. The clients are
    in this process and share the machine with the servers, so the overhead includes theirs. At last, single requests
    are sent twice: first the store does not hold their prefix, then it does.
    """
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
    engine = llm.session.new_engine()
    with server(*words, args.cache) as ours, server(*words, "none") as none:
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
    clocks = [each.alone for each in rounds]
    loads = {name: [getattr(each, name)[1] for each in rounds] for name in ("closed_loop", "all_at_once")}
    result = {
        "prefix_ratio": prefix_ratio(llm, items),
        "threads": threads,
        **rates(rounds),
        "server_overhead": {name: parts(zip(clocks, each, strict=True)) for name, each in loads.items()},
        "per_request": {
            name: per_request(each, args.requests) for name, each in {"engine_alone": clocks, **loads}.items()
        },
        "first_settled_block_miss_ms": 1e3 * statistics.median(misses),
        "first_settled_block_hit_ms": 1e3 * statistics.median(hits),
    }
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    return Record("benchmarks serving", about(llm, seed=21, settings=settings), result)


def rates(rounds: Sequence[ServingRound]) -> dict[str, object]:
    """Tokens a second of the contenders as medians over rounds, and the accuracy of the policies' answers."""
    gains = [rate(each.closed_loop) / rate(each.none) for each in rounds]
    tokens = sum(outcome.output_tokens for outcome in rounds[0].closed_loop[0].outcomes)
    return {
        "served_gain_over_none": statistics.median(gains),
        "served_gain_range": [min(gains), max(gains)],
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
    policy = llm.session.policy(llm.session.cache, llm.session.cache_config)
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
    params = SamplingParams.from_mapping(transit.SAMPLING)
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
