"""Sends requests at a rate, at a concurrency, or both."""

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tqdm import tqdm

from remask.checks.values import real, whole
from remask.errors import ConfigError
from remask_lab.load.client import RequestOutcome, send
from remask_lab.load.mix import HttpRequest, Target


@dataclass(frozen=True, slots=True)
class Load:
    """When requests are sent.

    Attributes:
        request_rate: arrivals a second, a Poisson process. `inf` sends all requests at once.
        max_concurrency: largest number of open requests; further arrivals wait. None sets no limit.
        timeout_s: a request fails after this many seconds without a byte.
        seed: of the arrivals.

    Raises `ConfigError` on values out of range.
    """

    request_rate: float = math.inf
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.request_rate != math.inf:
            real("request_rate", self.request_rate, low=0.0, above=True)
        whole("max_concurrency", self.max_concurrency, low=1, optional=True)
        real("timeout_s", self.timeout_s, low=0.0, above=True)
        whole("seed", self.seed, low=0)

    def arrivals(self, count: int) -> list[float]:
        """Seconds after the start at which each of `count` requests arrives."""
        if self.request_rate == math.inf:
            return [0.0] * count
        rng, at, times = random.Random(self.seed), 0.0, []
        for _ in range(count):
            times.append(at)
            at += rng.expovariate(self.request_rate)
        return times


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Outcomes in the order of the requests, and the seconds from the first request to the end of the last one."""

    outcomes: list[RequestOutcome]
    seconds: float
    peak_concurrency: int


async def run_load(
    target: Target,
    requests: Sequence[HttpRequest],
    load: Load,
    extra: Mapping[str, Any] | None = None,
    *,
    progress: bool = False,
) -> LoadRun:
    """Send `requests` to the server, with the `extra` fields in every body. Raises `ConfigError` without requests."""
    if not requests:
        raise ConfigError("a load needs at least one request")
    most = load.max_concurrency or len(requests)
    turns = asyncio.Semaphore(most)
    fields = {"model": target.model, **(extra or {})}
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
    timeout = httpx.Timeout(load.timeout_s, pool=None)
    running = peak = 0
    with tqdm(total=len(requests), desc="requests", unit="req", disable=not progress) as bar:
        async with httpx.AsyncClient(
            base_url=target.base_url, headers=dict(target.headers), limits=limits, timeout=timeout
        ) as client:
            origin = time.perf_counter()

            async def one(request: HttpRequest, at: float) -> RequestOutcome:
                nonlocal running, peak
                await asyncio.sleep(max(0.0, origin + at - time.perf_counter()))
                async with turns:
                    running += 1
                    peak = max(peak, running)
                    try:
                        return await send(client, request, fields, origin)
                    finally:
                        running -= 1
                        bar.update()

            outcomes = await asyncio.gather(*map(one, requests, load.arrivals(len(requests))))
            seconds = time.perf_counter() - origin
    return LoadRun(list(outcomes), seconds, peak)
