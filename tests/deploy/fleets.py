"""What two replicas are asked: more prefixes than the store of one of them can hold."""

import asyncio
from collections.abc import Sequence

from remask_lab.load.load import Load, run_load
from remask_lab.load.mix import HttpRequest, PromptMix
from remask_lab.load.target import find_target
from remask_lab.speed.routing import BUNDLED

BUDGET = 1300  # tokens: five prefixes of the eight
ASKS: Sequence[HttpRequest] = PromptMix(num_prompts=40, prefixes=8, seed=3).draw(BUNDLED)


def hit_ratio(base_url: str, asks: Sequence[HttpRequest] = ASKS) -> float:
    """Share of the prompt tokens that were read from stores, of all requests sent to one address."""
    outcomes = asyncio.run(run_load(find_target(base_url), asks, Load(max_concurrency=2))).outcomes
    assert [outcome.message for outcome in outcomes if outcome.error is not None] == []
    assert all(outcome.correct for outcome in outcomes)
    return sum(outcome.cached_tokens for outcome in outcomes) / sum(outcome.input_tokens for outcome in outcomes)
