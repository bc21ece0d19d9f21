"""Random requests on random A2D and Stable-DiffCoder models, in mixed batches, against a dense decoder.

Both sides compute in float64; logits are read in float32. Decodes that turn on a rounding are not drawn.
"""

import random
from typing import Any

import pytest

from remask.engine.request import Request
from remask.request.result import Result
from tests.engine import kinds
from tests.engine.support import Work, poisoned_engine, policy_of, run
from tests.oracles import a2d
from tests.oracles.a2d import Decoded
from tests.sampling_fields import flat_params

NARROW = 1e-5


def draw_run(rng: random.Random, model: str) -> dict[str, Any]:
    """As goldens have it. Prompts end anywhere, some before the first block is full; some begin alike."""
    raw, blocks = kinds.RAW[model], model in kinds.BLOCKS
    shared = random.Random(f"{model} {rng.randrange(2)}")
    prompt = kinds.tokens(shared, 24)[: rng.choice([0, 9, 17, 24])] + kinds.tokens(rng, rng.randint(1, 9))
    run: dict[str, Any] = {"prompt": prompt, "max_new_tokens": rng.randint(1, 14)}
    run["block_size"] = rng.choice([raw.get("block_size", 4), rng.randint(2, 6)])
    run["steps"] = rng.randint(1, 24)
    if model == "stable-diffcoder":
        run |= {"threshold": rng.choice([0.2, 0.4, 0.7])} if rng.random() < 0.5 else {}
    else:
        run |= {
            "sampler": "bd3lm" if raw.get("block_size") else "mdlm",
            "right_shift_logits": raw["right_shift_logits"],
        }
    if blocks and rng.random() < 0.3:
        run["stop"] = rng.randrange(kinds.MASK)
    elif not blocks and rng.random() < 0.3:
        run["cfg_scale"] = rng.choice([0.5, 1.5])
    return run


def drawn(rng: random.Random, model: str) -> tuple[dict[str, Any], Decoded]:
    for _ in range(30):
        run = draw_run(rng, model)
        expected = a2d.decode(a2d.model(kinds.checkpoint(model).folder), run)
        if expected.narrowest > NARROW:
            return run, expected
    raise AssertionError("every decode turns on a rounding")


def work_of(rng: random.Random, name: str, run: dict[str, Any], *, blocks: bool) -> Work:
    length, block = run["max_new_tokens"], run["block_size"]
    sampling = {"max_tokens": length, "block_length": block, "ignore_eos": True}
    sampling |= {"threshold": run.get("threshold"), "stop_token_ids": [run["stop"]] if "stop" in run else []}
    sampling |= {"cfg_scale": run.get("cfg_scale", 0.0)}
    sampling |= {"steps_per_block": -(-run["steps"] // -(-length // block))} if blocks else {"steps": run["steps"]}
    cache, config = rng.choice([("none", {}), ("exact", {}), ("exact", {"prefill_chunk": rng.choice([1, 5, 8])})])
    policy = policy_of(cache, **config) if blocks else policy_of("none")
    return Work(Request(name, run["prompt"], flat_params(sampling)), policy, rng.randrange(12))


def trace(run: dict[str, Any], result: Result) -> list[list[list[int]]]:
    first = len(run["prompt"])
    return [
        [[position - first, token] for position, token in zip(each.positions, each.token_ids, strict=True)]
        for each in result.trace
    ]


def row_layers(model: str, run: dict[str, Any], work: Work, expected: Decoded, result: Result) -> int:
    """Every row up to the block's end in each pass, or each row as often as it must be."""
    config, prompt, block = kinds.checkpoint(model).model.config, len(run["prompt"]), run["block_size"]
    whole: int = prompt + run["max_new_tokens"]
    ahead = prompt % block if config.sampling.blocks_from_prompt else 0
    starts = [(place - ahead) // block * block + ahead for place in range(whole)]
    blocks = [(max(0, start), min(start + block, whole)) for start in starts]
    passes = [blocks[prompt + step[0][0]] for step in expected.trace]
    if work.policy.traits.sharing != "pages":
        seen = [stop if config.kind == "block_causal" else whole for _, stop in passes]
        return sum(seen) * config.layers
    rows: int = passes[0][0] - result.usage.cached_tokens  # of the prompt's whole blocks
    last, open_ = passes[0], set(range(run["max_new_tokens"]))
    for (start, stop), step in zip(passes, expected.trace, strict=True):
        committed = 0 if (start, stop) == last else last[1] - last[0]
        led = config.shift and start - prompt in open_ and not committed
        if led and (start, stop) == passes[0] and open_ == set(range(run["max_new_tokens"])):
            led = not rows  # its first pass computes the rows before it, if any are left
        rows += stop - start + committed + bool(led)
        last, open_ = (start, stop), open_ - {place for place, _ in step}
    return rows * config.layers


@pytest.mark.few(7)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", kinds.CUT)
def test_mixed_batches(model: str, seed: int) -> None:
    rng, blocks = random.Random(f"{model} {seed}"), model in kinds.BLOCKS
    runs = {str(number): drawn(rng, model) for number in range(8)}
    work = [work_of(rng, name, run, blocks=blocks) for name, (run, _) in runs.items()]
    rng.shuffle(work)
    limits: dict[str, Any] = {
        "max_num_seqs": rng.choice([2, 5, 20]),
        "max_row_layers": rng.choice([None, 30, 150]),
        "page_size": kinds.checkpoint(model).block * rng.choice([1, 2, 3, 4]),
        "store_budget_tokens": rng.choice([0, 9, 30, 100]),
        "max_model_len": 64,
    }
    results = run(poisoned_engine(kinds.checkpoint(model).model, **limits), work)
    for each in work:
        (asked, expected), result = runs[each.request.id], results[each.request.id]
        assert result.error is None
        assert list(result.token_ids) == expected.tokens, asked
        assert trace(asked, result) == expected.trace, asked
        if not asked.get("cfg_scale"):
            assert result.usage.row_layers == row_layers(model, asked, each, expected, result), asked
