"""What a request with correction steps tells while it runs, and how stops end it."""

from typing import Any

import pytest

from remask.request.result import Event, Result
from tests.engine import kinds
from tests.engine.support import poisoned_engine
from tests.engine.test_block_causal_against_oracles import work_of

CORRECTED: dict[str, Any] = {"correction_steps": 6, "correction_temperature": 1.0, "correction_tokens": 3, "seed": 2}


def answer(cache: str = "none", **sampling: Any) -> tuple[list[Event], Result]:
    """All events of one request, and its result."""
    given = {"max_tokens": 10, "block_length": 4, "canvas_length": 20, "seed": 1, **sampling}
    line = {"cache": cache, "cache_config": {}, "prompt_token_ids": [1, 2, 3], "sampling": given}
    engine = poisoned_engine(kinds.checkpoint("gidd").model, decode=lambda ids: "".join(f"<{token}>" for token in ids))
    item = work_of(line, "x")
    engine.add(item.asked)
    events = []
    while engine.busy:
        events += engine.step()
    result = events[-1].result
    assert result is not None
    return events, result


@pytest.mark.parametrize("cache", ["none", "block-prefix", "uniform-cache"])
def test_nothing_is_told_as_settled_before_the_correction_is_over(cache: str) -> None:
    events, result = answer(cache, **CORRECTED)
    told = [event.settled for event in events if event.settled]
    assert told == [result.token_ids]
    assert (result.usage.steps, result.usage.correction_steps) == (12 + 6, 6)
    last = [event.settled or event.transfer for event in events[:-1]].index(result.token_ids)
    assert last == len(events) - 2, "the step that settles is the last"
    plain, before = answer(cache, seed=2)
    assert len([event for event in plain if event.settled]) == 3, "without a correction a block settles at a time"
    assert before.token_ids != result.token_ids
    assert before.usage.correction_steps is None


def test_a_correction_that_finds_nothing_is_over() -> None:
    _, result = answer(correction_steps=200, correction_temperature=0.0, seed=6)
    corrections = result.usage.correction_steps
    assert corrections is not None
    assert 1 < corrections < 200
    changed = {transfer.step for transfer in result.trace}
    assert {result.usage.steps - corrections, result.usage.steps - 2} <= changed
    assert result.usage.steps - 1 not in changed, "its last step changed nothing"


def test_stops_count_when_the_correction_is_over() -> None:
    """One that it writes cuts the response; one that it takes away is as if it had never been."""
    _, plain = answer(seed=2)
    _, whole = answer(**CORRECTED)
    fresh = next(token for token in whole.token_ids[:-1] if token not in plain.token_ids)
    gone = next(token for token in plain.token_ids if token not in whole.token_ids)
    _, cut = answer(**CORRECTED, stop_token_ids=[fresh])
    first = whole.token_ids.index(fresh)
    assert (cut.finish_reason, cut.token_ids) == ("stop", whole.token_ids[: first + 1])
    assert cut.usage.steps == whole.usage.steps, "no stop ends it before"
    _, kept = answer(**CORRECTED, stop_token_ids=[gone])
    assert (kept.finish_reason, kept.token_ids) == ("length", whole.token_ids)
    assert answer(seed=2, stop_token_ids=[gone])[1].finish_reason == "stop"


def test_patience_ends_what_never_comes_to_rest() -> None:
    """Hot draws change tokens for ever; without more right tokens the original's rule ends them, and 0 never does."""
    hot: dict[str, Any] = {"correction_steps": 60, "correction_temperature": 5.0, "correction_tokens": 1}
    counts = {patience: answer(**hot, correction_patience=patience)[1].usage.correction_steps for patience in (2, 0)}
    assert counts[0] == 60
    assert counts[2] is not None
    assert 3 <= counts[2] < 30
    assert answer(**hot)[1].usage.correction_steps == answer(**hot, correction_patience=32)[1].usage.correction_steps
