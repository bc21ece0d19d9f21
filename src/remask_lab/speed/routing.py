"""Hit ratios of two replicas: each prefix goes where it is held, against round-robin.

    python -m remask_lab.speed.routing [--fronts client,vllm-router,ray] [--requests 40] [--prefixes 8] [--json FILE]

Uses the bundled model on two replicas of this machine, whose stores hold fewer prefixes than there are. `client` is
one of twenty lines that routes by `remask.deploy.routing`; `vllm-router` hashes a header that names the prefix;
`ray` is `remask deploy`. A front that is not installed is left out, and the result says so.
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import xxhash

from remask import LLM
from remask.deploy.identity import prefix_identity
from remask.deploy.routing import Spill
from remask_lab.load.client import Outcome, send
from remask_lab.load.load import Load, put
from remask_lab.load.mix import Ask, Mix
from remask_lab.load.target import Target, find_target
from remask_lab.records.record import Record, about, write_record
from remask_lab.speed.servers import REMASK, free_port, process, serving

ROUTER = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
BUNDLED = Target("http://unused", "bundled", info={"model_path": "bundled"})
AT_A_TIME = 2
THREADS = {"OMP_NUM_THREADS": "1"}

Ratios = Mapping[str, float]


def main() -> None:
    """Measure, print one JSON object, and write it with what it was measured on where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fronts", default="client,vllm-router,ray", help="which, joined by commas (default all)")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument(
        "--budget", type=int, default=1300, help="tokens that each store may hold: five of the prefixes"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    args = parser.parse_args()
    fronts: dict[str, Callable[[Sequence[Ask], int], Ratios] | None] = {
        "client": own_client,
        "vllm-router": None if ROUTER is None else vllm_router,
        "ray": None if importlib.util.find_spec("ray") is None else ray_serve,
    }
    asked = args.fronts.split(",")
    unknown = [name for name in asked if name not in fronts]
    if unknown:
        parser.error(f"--fronts: unknown {unknown[0]!r}; choose of {', '.join(fronts)}")
    asks = Mix(num_prompts=args.requests, prefixes=args.prefixes, seed=3).draw(BUNDLED)
    result: dict[str, Ratios | str] = {}
    for name in asked:
        measure = fronts[name]
        result[name] = "not installed" if measure is None else measure(asks, args.budget)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        llm = LLM("bundled", dtype="float32")
        write_record(args.json, Record("benchmarks routing", about(llm, seed=3, settings=settings), result))
    print(json.dumps(result, indent=2))


def named(ask: Ask) -> Ask:
    """The request with its prefix named in a header, for routers that hash one."""
    identity = prefix_identity(ask.body)
    assert identity is not None
    return replace(ask, headers={"X-Session-ID": xxhash.xxh64_hexdigest(identity)})


def hit_ratio(outcomes: Sequence[Outcome]) -> float:
    """Share of the prompt tokens that were read from stores. Raises `RuntimeError` where a request failed."""
    failed = [outcome.message for outcome in outcomes if outcome.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return sum(outcome.cached_tokens for outcome in outcomes) / sum(outcome.input_tokens for outcome in outcomes)


def through(base_url: str, asks: Sequence[Ask]) -> float:
    """Hit ratio of all requests sent to one address."""
    return hit_ratio(asyncio.run(put(find_target(base_url), asks, Load(max_concurrency=AT_A_TIME))).outcomes)


def own_client(asks: Sequence[Ask], budget: int) -> Ratios:
    """Two plain servers, and the client chooses."""
    spill, turn = Spill(), itertools.count()

    def by_prefix(ask: Ask, loads: Mapping[str, int]) -> str:
        return spill.order(prefix_identity(ask.body), loads)[0]

    def in_turn(_ask: Ask, loads: Mapping[str, int]) -> str:
        return list(loads)[next(turn) % len(loads)]

    with two_servers(budget) as servers:
        return {
            name: hit_ratio(asyncio.run(_choosing(emptied(servers), asks, choose)))
            for name, choose in (("by_prefix", by_prefix), ("round_robin", in_turn))
        }


async def _choosing(
    servers: Sequence[str], asks: Sequence[Ask], choose: Callable[[Ask, Mapping[str, int]], str]
) -> list[Outcome]:
    # Names, and not the addresses with their random ports, decide where prefixes go: so it is the same in every run.
    addresses = dict(zip("ab", servers, strict=True))
    loads, turns = dict.fromkeys(addresses, 0), asyncio.Semaphore(AT_A_TIME)

    async def one(ask: Ask) -> Outcome:
        async with turns:
            name = choose(ask, loads)
            loads[name] += 1
            try:
                async with httpx.AsyncClient(base_url=addresses[name], timeout=60) as client:
                    return await send(client, ask, {}, 0.0)
            finally:
                loads[name] -= 1

    return await asyncio.gather(*map(one, asks))


def vllm_router(asks: Sequence[Ask], budget: int) -> Ratios:
    """Two plain servers behind `vllm-router`."""
    with two_servers(budget) as servers:
        ratios = {}
        for name, policy, sent in (
            ("by_prefix", "consistent_hash", [named(ask) for ask in asks]),
            ("round_robin", "round_robin", asks),
        ):
            with router(policy, *emptied(servers)) as base:
                ratios[name] = through(base, sent)
        return ratios


@contextmanager
def router(policy: str, *workers: str) -> Iterator[str]:
    """`vllm-router` in front of servers, until the block ends."""
    port = str(free_port())
    words = [str(ROUTER), "--host", "127.0.0.1", "--port", port, "--worker-urls", *workers, "--policy", policy]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    base = f"http://127.0.0.1:{port}"
    with process([*words, *metrics], "(Starting server on)"):
        while not _healthy(base):
            time.sleep(0.05)
        yield base


def _healthy(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health").status_code == 200
    except httpx.HTTPError:
        return False


def ray_serve(asks: Sequence[Ask], budget: int) -> Ratios:
    """`remask deploy`, once under each routing."""
    ratios = {}
    for name, routing in (("by_prefix", "prefix"), ("round_robin", "round-robin")):
        with (
            tempfile.TemporaryDirectory() as home,
            fleet(home, budget, "--min-replicas", "2", "--routing", routing) as base,
        ):
            ratios[name] = through(base, asks)
    return ratios


@contextmanager
def fleet(home: str, budget: int, *own: str) -> Iterator[str]:
    """`remask deploy` with these words of its own; Ray keeps its token in `home`."""
    words = ["deploy", "bundled", "--dtype", "float32", "--num-cpus", "0.5", "--port", str(free_port())]
    words += ["--store-budget-tokens", str(budget), *own]
    settings = {**THREADS, "HOME": home, "RAY_USAGE_STATS_ENABLED": "0"}
    with process([*REMASK, *words], r"INFO running on (http://\S+)", **settings) as base:
        yield base


@contextmanager
def two_servers(budget: int) -> Iterator[list[str]]:
    """Addresses of two plain servers."""
    words = ["bundled", "--dtype", "float32", "--threads", "1", "--store-budget-tokens", str(budget)]
    with serving(*words) as one, serving(*words) as other:
        yield [one.base_url, other.base_url]


def emptied(servers: Sequence[str]) -> Sequence[str]:
    """The same servers, with nothing in their stores."""
    for server in servers:
        httpx.delete(f"{server}/v1/cache").raise_for_status()
    return servers


if __name__ == "__main__":
    main()
