"""Questions of the transit task that are asked of a server over HTTP, several at a time or at a rate."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from remask.tasks import transit
from tests.server.serving import URL


@dataclass(frozen=True)
class Ask:
    """A body, what is right, and headers of its own."""

    body: dict[str, Any]
    answer: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of an `Ask`: a status, and of an answer its tokens and whether it is right."""

    status: int
    seconds: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    right: bool = False


def asks(count: int, prefixes: int, seed: int) -> list[Ask]:
    """Questions under so many shared system prompts, shuffled: dealt in turn, two servers in turn share no prompt."""
    workload = transit.make_workload(count, prefixes, seed)
    random.Random(seed).shuffle(workload)
    return [Ask({"messages": item.messages}, item.answer) for item in workload]


async def send(client: httpx.AsyncClient, ask: Ask) -> Outcome:
    start = time.monotonic()
    response = await client.post(URL, json=ask.body, headers=dict(ask.headers))
    seconds = time.monotonic() - start
    if response.status_code != 200:
        return Outcome(response.status_code, seconds)
    told = response.json()
    usage, text = told["usage"], told["choices"][0]["message"]["content"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Outcome(200, seconds, usage["prompt_tokens"], cached, transit.is_correct(text, ask.answer))


async def send_all(
    base_url: str, asked: Sequence[Ask], at_a_time: int | None = None, rate: float | None = None
) -> list[Outcome]:
    """Ask all of them of one address: never more than `at_a_time`, and `rate` a second in a Poisson process."""
    most, rng, at = at_a_time or len(asked), random.Random(0), 0.0
    turns = asyncio.Semaphore(most)
    limits = httpx.Limits(max_connections=most)

    async def one(client: httpx.AsyncClient, ask: Ask, at: float) -> Outcome:
        await asyncio.sleep(at)
        async with turns:
            return await send(client, ask)

    async with httpx.AsyncClient(base_url=base_url, timeout=600, limits=limits) as client:
        sent = []
        for ask in asked:
            sent.append(one(client, ask, at))
            at += rng.expovariate(rate) if rate else 0.0
        return await asyncio.gather(*sent)


def hit_ratio(told: Sequence[Outcome]) -> float:
    """Share of the prompt tokens that were read from stores. All were answered, and right."""
    assert all(each.right for each in told), [each.status for each in told]
    return sum(each.cached_tokens for each in told) / sum(each.prompt_tokens for each in told)
