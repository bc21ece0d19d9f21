"""Random requests on growing canvases under every policy, beside ordinary ones, against the dense decoders."""

import random

import pytest

from remask.request.result import Result
from tests.engine.support import first_clear, poisoned_engine, run
from tests.engine.test_against_oracles import (
    DREAM,
    INNER,
    LAYERS,
    LLADA,
    Kind,
    Line,
    compare,
    draw_line,
    drawn,
    left_out,
    limits,
    model_of,
    oracle,
    work_of,
)
from tests.oracles.canvas import Decode
from tests.oracles.growing import stages

Stages = list[tuple[Line, Decode]]


def growing_line(rng: random.Random, name: str, kind: Kind, layers: int) -> Line:
    """The line of a request under one policy, in blocks of which the last may be shorter."""
    line = draw_line(rng, name, kind, layers)
    sampling = {**line["sampling"], "growing_canvas": True}
    tokens, block = sampling["max_tokens"], min(sampling["block_length"], rng.randint(3, 5))
    if "order" in sampling:
        block = sampling["block_length"]
    elif tokens > block + 1:
        tokens -= rng.choice([0, 1])
    steps = sampling.pop("steps", None)
    if steps is not None and sampling["remasking"] != "confidence_threshold":  # whose steps must divide each block
        sampling["steps_per_block"] = max(2, round(steps * block / tokens))
    line["sampling"] = sampling | {"max_tokens": tokens, "block_length": block}
    if "window" in line["cache_config"]:
        window = min(line["cache_config"]["window"], block, tokens % block or block)
        line["cache_config"] = {**line["cache_config"], "window": window}
    return line


def drawn_growing(rng: random.Random, model: str, name: str, kind: Kind) -> tuple[Line, Stages]:
    return first_clear(
        lambda: growing_line(rng, name, kind, LAYERS[model]),
        lambda line: stages(line, lambda stage: oracle(model, stage)),
    )


def check(line: Line, expected: Stages, result: Result, shift: int) -> None:
    """Tokens, transfers, passes and work are those of the blocks, one after the other."""
    assert result.error is None
    assert list(result.token_ids) == expected[-1][1].output_ids
    transfers = [each for _, stage in expected for each in stage.transfers]
    trace = [(list(transfer.positions), list(transfer.token_ids)) for transfer in result.trace]
    assert trace == [(positions, tokens) for _, positions, tokens in transfers]
    if line["cache"] in ("none", *INNER):  # which run no pass that transfers nothing
        busy = [sum(stage.rows[number]) for _, stage in expected for number, _, _ in stage.transfers]
        if line["cache"] == "none":
            assert (result.usage.forwards, result.usage.row_layers) == (len(busy), sum(busy))
        return
    assert result.usage.forwards == sum(stage.forwards for _, stage in expected)
    rows = sum(stage.row_layers - left_out(own, stage, shift) for own, stage in expected)
    assert result.usage.row_layers == rows


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["illada", "llada_gqa", "dream"])
def test_mixed_batches(model: str, seed: int) -> None:
    """A growing request of each kind in one batch with some whose canvas has its whole length."""
    rng, kinds = random.Random(f"growing {model} {seed}"), DREAM if model == "dream" else LLADA
    growing = {name: drawn_growing(rng, model, name, kind) for name, kind in kinds.items()}
    fixed = {f"fixed {name}": drawn(rng, model, name, kinds[name]) for name in rng.sample(list(kinds), 4)}
    work = [work_of(line, name, rng.randrange(10)) for name, (line, _) in {**growing, **fixed}.items()]
    rng.shuffle(work)
    results = run(poisoned_engine(model_of(model), **limits(rng)), work)
    shift = model_of(model).config.shift
    for name, (line, found) in growing.items():
        check(line, found, results[name], shift)
    for name, (line, expected) in fixed.items():
        compare(line, expected, results[name], shift)
