"""Prefixes on two replicas: routed by what they hold, and in turn."""

import argparse
import asyncio
import importlib.util
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import xxhash

from remask import LLM
from remask.checks.values import one_of
from remask.deploy.routing import Spill, prefix_identity
from remask_lab.load.client import RequestOutcome, send_to
from remask_lab.load.load import Load, run_load
from remask_lab.load.mix import HttpRequest, PromptMix, Target, empty_store, find_target, is_healthy
from remask_lab.records.record import Record, about
from remask_lab.speed.command import REMASK
from remask_lab.speed.serving import free_port, process, server

ROUTER = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
BUNDLED = Target("http://unused", "bundled-transit", info={"model_path": "bundled-transit"})
AT_A_TIME = 2
THREADS = {"OMP_NUM_THREADS": "1"}

Ratios = Mapping[str, float]


def routing(args: argparse.Namespace) -> Record:
    """Hit ratios of two replicas: each prefix goes to the replica that holds it, compared with round-robin.

    Runs the bundled model on two replicas of this machine. Their stores hold fewer prefixes than there are. `client` is
    a client of twenty lines that routes by `remask.deploy.routing`. `vllm-router` hashes a header that names the
    prefix. `ray` is `remask deploy`. A front that is not installed is left out, and the result says so.
    """
    fronts: dict[str, Callable[[Sequence[HttpRequest], int], Ratios] | None] = {
        "client": own_client,
        "vllm-router": None if ROUTER is None else vllm_router,
        "ray": None if importlib.util.find_spec("ray") is None else ray_serve,
    }
    asked = args.fronts.split(",")
    for name in asked:
        one_of("--fronts", name, fronts)
    requests = PromptMix(num_prompts=args.requests, prefixes=args.prefixes, seed=3).draw(BUNDLED)
    result: dict[str, Ratios | str] = {}
    for name in asked:
        measure = fronts[name]
        result[name] = "not installed" if measure is None else measure(requests, args.budget)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    llm = LLM("bundled-transit", dtype="float32")
    return Record("benchmarks routing", about(llm, seed=3, settings=settings), result)


def named(request: HttpRequest) -> HttpRequest:
    """Returns the request with a header that names its prefix, for routers that hash one."""
    identity = prefix_identity(request.body)
    assert identity is not None
    return replace(request, headers={"X-Session-ID": xxhash.xxh64_hexdigest(identity)})


def hit_ratio(outcomes: Sequence[RequestOutcome]) -> float:
    """The share of the prompt tokens that were read from stores. Raises `RuntimeError` where a request failed."""
    failed = [outcome.message for outcome in outcomes if outcome.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return sum(outcome.cached_tokens for outcome in outcomes) / sum(outcome.input_tokens for outcome in outcomes)


def through(base_url: str, requests: Sequence[HttpRequest]) -> float:
    """The hit ratio of all requests, sent to one address."""
    return hit_ratio(asyncio.run(run_load(find_target(base_url), requests, Load(max_concurrency=AT_A_TIME))).outcomes)


def own_client(requests: Sequence[HttpRequest], budget: int) -> Ratios:
    """Two plain servers. The client chooses between them."""
    spill, turn = Spill(), itertools.count()

    def by_prefix(request: HttpRequest, loads: Mapping[str, int]) -> str:
        return spill.order(prefix_identity(request.body), loads)[0]

    def in_turn(_ask: HttpRequest, loads: Mapping[str, int]) -> str:
        return list(loads)[next(turn) % len(loads)]

    with two_servers(budget) as servers:
        return {
            name: hit_ratio(asyncio.run(_choosing(emptied(servers), requests, choose)))
            for name, choose in (("by_prefix", by_prefix), ("round_robin", in_turn))
        }


async def _choosing(
    servers: Sequence[str], requests: Sequence[HttpRequest], choose: Callable[[HttpRequest, Mapping[str, int]], str]
) -> list[RequestOutcome]:
    # Names decide where prefixes go, not the addresses with their random ports. So every run routes the same way.
    addresses = dict(zip("ab", servers, strict=True))
    loads, turns = dict.fromkeys(addresses, 0), asyncio.Semaphore(AT_A_TIME)

    async def one(request: HttpRequest) -> RequestOutcome:
        async with turns:
            name = choose(request, loads)
            loads[name] += 1
            try:
                return await send_to(addresses[name], request)
            finally:
                loads[name] -= 1

    return await asyncio.gather(*map(one, requests))


def vllm_router(requests: Sequence[HttpRequest], budget: int) -> Ratios:
    """Two plain servers behind `vllm-router`."""
    with two_servers(budget) as servers:
        ratios = {}
        for name, policy, sent in (
            ("by_prefix", "consistent_hash", [named(request) for request in requests]),
            ("round_robin", "round_robin", requests),
        ):
            with router(policy, *emptied(servers)) as base:
                ratios[name] = through(base, sent)
        return ratios


@contextmanager
def router(policy: str, *workers: str) -> Iterator[str]:
    """Run `vllm-router` in front of servers until the block ends. Yields its address."""
    port = str(free_port())
    words = [str(ROUTER), "--host", "127.0.0.1", "--port", port, "--worker-urls", *workers, "--policy", policy]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    base = f"http://127.0.0.1:{port}"
    with process([*words, *metrics], "(Starting server on)"):
        while not is_healthy(base):
            time.sleep(0.05)
        yield base


def ray_serve(requests: Sequence[HttpRequest], budget: int) -> Ratios:
    """`remask deploy`, once with each routing."""
    ratios = {}
    for name, routing in (("by_prefix", "prefix"), ("round_robin", "round-robin")):
        with (
            tempfile.TemporaryDirectory() as home,
            fleet(home, budget, "--min-replicas", "2", "--routing", routing) as base,
        ):
            ratios[name] = through(base, requests)
    return ratios


@contextmanager
def fleet(home: str, budget: int, *own: str) -> Iterator[str]:
    """Run `remask deploy` with these further words until the block ends. Ray keeps its token in `home`."""
    words = ["deploy", "bundled-transit", "--dtype", "float32", "--num-cpus", "0.5", "--port", str(free_port())]
    words += ["--store-budget-tokens", str(budget), *own]
    settings = {**THREADS, "HOME": home, "RAY_USAGE_STATS_ENABLED": "0"}
    with process([*REMASK, *words], r"INFO running on (http://\S+)", **settings) as base:
        yield base


@contextmanager
def two_servers(budget: int) -> Iterator[list[str]]:
    """Run two plain servers until the block ends. Yields their addresses."""
    words = ["bundled-transit", "--dtype", "float32", "--threads", "1", "--store-budget-tokens", str(budget)]
    with server(*words) as one, server(*words) as other:
        yield [one.base_url, other.base_url]


def emptied(servers: Sequence[str]) -> Sequence[str]:
    """Empty the servers' stores, and return the servers."""
    for each in servers:
        empty_store(each)
    return servers
