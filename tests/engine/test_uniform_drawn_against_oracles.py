"""Drawn tokens and corrections of uniform models, in mixed batches, against a dense decoder that makes the same draws.

Both sides compute in float64; logits are read and draws are made in float32. Decodes that turn on a rounding are not
drawn.
"""

import random
from typing import Any

import pytest

from remask.request.result import Event, Result
from remask.request.sampling_groups import ANCESTRAL
from tests.engine import kinds
from tests.engine.support import events_of, first_clear, poisoned_engine, run
from tests.engine.test_block_causal_against_oracles import trace, work_of
from tests.engine.test_uniform_against_oracles import NARROW, Line, draw_line, limits, plain
from tests.oracles import gidd, uniform_drawn
from tests.oracles.canvas import Decode

CORRECTABLE = ("gidd", "gidd, hybrid")


def oracle(model: str, line: Line) -> Decode | None:
    """What the line decodes to; None where a rounding would decide that."""
    gaps = [1.0]
    decoded = uniform_drawn.decode(gidd.load(kinds.checkpoint(model).folder), line, gaps.append)
    return None if min(gaps) < NARROW else decoded


def draw(rng: random.Random, model: str, corrected: bool) -> Line:
    line = draw_line(rng, model)
    sampling = line["sampling"]
    sampling.pop("revision_tokens", None)  # of greedy decodes alone
    sampling |= {"seed": rng.randrange(1000), "temperature": rng.choice([0.0, 0.7, 1.0])}
    if sampling["temperature"] > 0:
        sampling |= rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}])
    if rng.random() < 0.6:
        del sampling["tokens_per_step"]
        sampling["sampler"] = rng.choice(ANCESTRAL)
    if corrected:
        sampling |= {"correction_steps": rng.randint(1, 9), "correction_temperature": rng.choice([0.0, 0.1, 1.0])}
        sampling["correction_tokens"] = rng.choice([1, 1, 2, 20])
    if rng.random() < 0.4:
        sampling["stop_token_ids"] = rng.sample(range(kinds.MASK), 6)
    return line


def drawn(rng: random.Random, model: str, corrected: bool) -> tuple[Line, Decode]:
    return first_clear(lambda: draw(rng, model, corrected), lambda line: oracle(model, line))


def compare(model: str, line: Line, expected: Decode, result: Result) -> None:
    sampling, usage = line["sampling"], result.usage
    assert result.error is None
    assert trace(result) == [(positions, values) for _, positions, values in expected.transfers]
    assert [transfer.step for transfer in result.trace] == [number for number, _, _ in expected.transfers]
    assert list(result.token_ids) == expected.output_ids
    assert result.finish_reason == (
        "stop" if set(expected.output_ids) & set(sampling.get("stop_token_ids", [])) else "length"
    )
    assert usage.forwards == usage.steps == expected.forwards
    if line["cache"] != "block-prefix":
        assert usage.row_layers == expected.row_layers
    wanted = sampling.get("correction_steps")
    if wanted is None:
        assert usage.correction_steps is None
    else:
        assert usage.correction_steps is not None
        assert 1 <= usage.correction_steps <= wanted
        steps = sampling["steps_per_block"]
        assert (usage.steps - usage.correction_steps) % steps == 0


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", kinds.UNIFORM)
def test_drawn_tokens_in_mixed_batches(model: str, seed: int) -> None:
    check_batch(random.Random(f"{model} {seed} drawn"), model, corrected=False)


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", CORRECTABLE)
def test_corrections_in_mixed_batches(model: str, seed: int) -> None:
    check_batch(random.Random(f"{model} {seed} corrected"), model, corrected=True)


def check_batch(rng: random.Random, model: str, corrected: bool) -> None:
    lines = {str(number): drawn(rng, model, corrected) for number in range(8)}
    work = [work_of(line, name, rng.randrange(12)) for name, (line, _) in lines.items()]
    rng.shuffle(work)
    results = run(poisoned_engine(kinds.checkpoint(model).model, **limits(rng)), work)
    for name, (line, expected) in lines.items():
        compare(model, line, expected, results[name])


CORRECTED: dict[str, Any] = {"correction_steps": 6, "correction_temperature": 1.0, "correction_tokens": 3, "seed": 2}


def answer(cache: str = "none", **sampling: Any) -> tuple[list[Event], Result]:
    line = plain([1, 2, 3], cache, **{"max_tokens": 10, "block_length": 4, "canvas_length": 20, "seed": 1, **sampling})
    engine = poisoned_engine(kinds.checkpoint("gidd").model, decode=lambda ids: "".join(f"<{token}>" for token in ids))
    events = events_of(engine, work_of(line, "x").asked)
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
