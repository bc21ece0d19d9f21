"""Drawn tokens and corrections of uniform models, in mixed batches, against a dense decoder that makes the same draws.

Both sides compute in float64; logits are read and draws are made in float32. Decodes that turn on a rounding are not
drawn.
"""

import random

import pytest

from remask.request.result import Result
from remask.request.sampling_groups import ANCESTRAL
from tests.engine import kinds
from tests.engine.support import poisoned_engine, run
from tests.engine.test_block_causal_against_oracles import trace, work_of
from tests.engine.test_uniform_against_oracles import NARROW, Line, draw_line, limits
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
    for _ in range(60):
        line = draw(rng, model, corrected)
        expected = oracle(model, line)
        if expected is not None:
            return line, expected
    raise AssertionError("every decode turns on a rounding")


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
