"""Random canvases with fixed parts under every policy, in mixed batches, against the dense decoders.

As in `test_against_oracles`, decodes that turn on a rounding are not drawn. On block-causal models fixed tokens before
the first hole are as good as prompt.
"""

import random
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from remask.plan.canvas import OPEN, Hole, Template
from tests.engine import kinds
from tests.engine import test_block_causal_against_oracles as block_causal
from tests.engine import test_uniform_against_oracles as uniform
from tests.engine.support import first_clear, poisoned_engine, run
from tests.engine.test_against_oracles import (
    DREAM,
    LAYERS,
    LLADA,
    VOCAB,
    Kind,
    Line,
    compare,
    draw_line,
    limits,
    model_of,
    oracle,
    work_of,
)
from tests.oracles.canvas import Canvas, Decode
from tests.oracles.sampling import block_steps, block_windows

Places = list[int | None]


def draw_template(rng: random.Random, length: int, vocab: int = VOCAB) -> Places:
    """Fixed tokens at one to all but one of the places, in runs; any token may be among them."""
    places: Places = [None] * length
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(length)
        for place in range(start, min(length, start + rng.randint(1, length))):
            places[place] = rng.randrange(vocab)
    if None not in places:
        places[rng.randrange(length)] = None
    return places


def template_of(places: Places) -> Template:
    """The product's form of it: a hole for each run of open places."""
    holes, start = [], 0
    for is_open, group in groupby(places, key=lambda token: token is None):
        stop = start + len(list(group))
        holes += [Hole(start, stop)] if is_open else []
        start = stop
    return Template(tuple(OPEN if token is None else token for token in places), tuple(holes))


def fitted(rng: random.Random, line: Line, places: Places) -> Line:
    """`line` with a template, and with settings that suit it."""
    sampling, config, prompt = dict(line["sampling"]), dict(line["cache_config"]), len(line["prompt_token_ids"])
    found = sum(token is None for token in places)
    canvas = Canvas(line["prompt_token_ids"], len(places), VOCAB - 1, places)
    blocks = len(block_windows(canvas, sampling["block_length"]))
    if "order" in sampling:
        starts = range(0, len(places), sampling["block_length"])
        ends = [min(start + sampling["block_length"], len(places)) for start in starts]
        holes = [[p for p in range(a, b) if places[p] is None] for a, b in zip(starts, ends, strict=True)]
        sampling["order"] = [[prompt + place for place in rng.sample(each, len(each))] for each in holes if each]
    if "window" in config:
        config["window"] = min(config["window"], found)
    if sampling["remasking"] == "confidence_threshold" and "steps" in sampling:
        sampling["steps"] = rng.choice([steps for steps in range(blocks, found + 1) if found % steps == 0])
    elif "steps" in sampling:
        sampling["steps"] = max(sampling["steps"], blocks)
    if line["cache"].startswith("block-") and sampling["remasking"] == "entropy":
        windows = block_windows(canvas, sampling["block_length"])
        while min(block_steps(canvas, windows, sampling["steps"])) < 2:  # fewer are not defined
            sampling["steps"] += 1
    return line | {"sampling": sampling, "cache_config": config, "template": places}


def drawn(rng: random.Random, model: str, name: str, kind: Kind) -> tuple[Line, Decode]:
    def draw() -> Line:
        line = draw_line(rng, name, kind, LAYERS[model])
        sampling = line["sampling"]
        if "order" not in sampling and rng.random() < 0.5:  # the last block may be shorter
            whole = sampling["block_length"] == sampling["max_tokens"]
            line["sampling"] = sampling = sampling | {"max_tokens": sampling["max_tokens"] + rng.randint(0, 2)}
            if whole:
                sampling["block_length"] = sampling["max_tokens"]
        return fitted(rng, line, draw_template(rng, sampling["max_tokens"]))

    return first_clear(draw, lambda line: oracle(model, line))


def check(model: str, seed: int, policies: dict[str, Kind]) -> None:
    """One request of each kind in one batch, joining at different steps."""
    rng = random.Random(f"holes {model} {seed}")
    lines = {name: drawn(rng, model, name, kind) for name, kind in policies.items()}
    order = list(lines)
    rng.shuffle(order)
    work = []
    for name in order:
        line = lines[name][0]
        item = work_of(line, name, rng.randrange(10))
        work.append(replace(item, request=replace(item.request, template=template_of(line["template"]))))
    results = run(poisoned_engine(model_of(model), **limits(rng)), work)
    for name, (line, expected) in lines.items():
        compare(line, expected, results[name], model_of(model).config.shift)
        found = line["template"].count(None)
        assert results[name].usage.completion_tokens == found
        assert results[name].usage.prompt_tokens == len(line["prompt_token_ids"]) + len(line["template"]) - found


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
@pytest.mark.parametrize("model", ["llada", "llada_gqa", "dream", "dream_dllm"])
def test_masked(model: str, seed: int) -> None:
    check(model, seed, DREAM if model.startswith("dream") else LLADA)


def drawn_uniform(rng: random.Random, model: str) -> tuple[Line, Decode]:
    def draw() -> Line:
        line = uniform.draw_line(rng, model)
        line["sampling"].pop("revision_tokens", None)  # refused beside fixed parts
        line["template"] = draw_template(rng, line["sampling"]["max_tokens"], kinds.VOCAB)
        return line

    return first_clear(draw, lambda line: uniform.oracle(model, line))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 8))])
@pytest.mark.parametrize("model", kinds.UNIFORM)
def test_uniform(model: str, seed: int) -> None:
    rng = random.Random(f"holes {model} {seed}")
    lines = {str(number): drawn_uniform(rng, model) for number in range(8)}
    work = []
    for name, (line, _) in lines.items():
        item = block_causal.work_of(line, name, rng.randrange(12))
        work.append(replace(item, request=replace(item.request, template=template_of(line["template"]))))
    results = run(poisoned_engine(kinds.checkpoint(model).model, **uniform.limits(rng)), work)
    for name, (_, expected) in lines.items():
        result = results[name]
        assert result.error is None
        assert list(result.token_ids) == expected.output_ids
        assert block_causal.trace(result) == [(positions, values) for _, positions, values in expected.transfers]
        assert [each.step for each in result.trace] == [number for number, _, _ in expected.transfers]
        assert result.usage.forwards == result.usage.steps == expected.forwards


@pytest.mark.parametrize("model", kinds.BLOCK_CAUSAL)
def test_block_causal(model: str) -> None:
    """Fixed tokens, then a hole: as if the tokens ended the prompt, with fewer passes for its prefill or as many."""
    rng, checkpoint = random.Random(f"holes {model}"), kinds.checkpoint(model)
    given: dict[str, tuple[int, ...]] = {}
    plain, filled = [], []
    for number in range(6):
        prompt, fixed, length = (kinds.tokens(rng, rng.randint(1, 9)) for _ in range(3))
        line: Line = {
            "cache": rng.choice(["none", "exact"]),
            "cache_config": {},
            "prompt_token_ids": [*prompt, *fixed],
            "sampling": {"max_tokens": len(length), "block_length": rng.choice([checkpoint.block, 4])},
        }
        item = block_causal.work_of(line, str(number), rng.randrange(6))
        plain.append(item)
        params = replace(item.request.params, max_tokens=len(fixed) + len(length))
        template = template_of([*fixed, *[None] * len(length)])
        asked = replace(item.request, prompt_token_ids=prompt, params=params, template=template)
        filled.append(replace(item, request=asked))
        given[str(number)] = tuple(fixed)
    cut: dict[str, Any] = {"page_size": 12, "max_num_seqs": rng.choice([2, 8])}
    expected, results = (run(poisoned_engine(checkpoint.model, **cut), work) for work in (plain, filled))
    for name, lead in given.items():
        assert results[name].error is None
        assert results[name].token_ids == lead + expected[name].token_ids
        assert results[name].trace == expected[name].trace
        assert results[name].usage.completion_tokens == expected[name].usage.completion_tokens
        assert results[name].usage.prompt_tokens == expected[name].usage.prompt_tokens
        assert results[name].usage.row_layers == expected[name].usage.row_layers
