"""Random requests on random uniform-diffusion models, in mixed batches, against a dense decoder of its own.

Both sides compute in float64; logits are read in float32. Decodes that turn on a rounding are not drawn.
"""

import random
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from remask.request.result import Result
from tests.engine import kinds
from tests.engine.support import first_clear, poisoned_engine, run
from tests.engine.test_block_causal_against_oracles import trace, work_of
from tests.oracles import gidd, uniform
from tests.oracles.canvas import Decode
from tests.oracles.gidd import GiddModel
from tests.oracles.uniform import Pick, Step
from tests.oracles.uniform_drift import KeptOutputs

Line: TypeAlias = dict[str, Any]
NARROW = 1e-5
POLICIES: tuple[tuple[str, Line], ...] = (
    ("none", {}),
    ("block-prefix", {}),
    *(("uniform-cache", {"refresh_next": interval}) for interval in (0, 1, 2, 4)),
    *(("uniform-cache", {"refresh_next": interval, "border": "neighbours"}) for interval in (0, 2)),
    *(("uniform-cache", {"refresh_next": 2, "drift": threshold}) for threshold in (0.01, 0.1, 0.4, 2.0)),
    ("uniform-cache", {"refresh_next": 0, "border": "neighbours", "drift": 0.1}),
)
real_greedy = uniform.greedy


class Watch:
    """How close a decode came to another choice."""

    narrowest = 1.0

    def greedy(self, model: GiddModel, tokens_per_step: int) -> Pick:
        inner = real_greedy(model, tokens_per_step)

        def pick(step: Step) -> Tensor:
            scores = uniform.step_scores(model, step).sort(descending=True).values
            best = step.logits.topk(2, -1).values
            gaps = [float((best[:, 0] - best[:, 1]).min())]
            if tokens_per_step < len(scores) and scores[tokens_per_step - 1] > 0:
                gaps.append(float(scores[tokens_per_step - 1] - scores[tokens_per_step]))
            positive = scores[:tokens_per_step][scores[:tokens_per_step] > 0]
            gaps += positive[-1:].tolist()
            self.narrowest = min(self.narrowest, *gaps)
            return inner(step)

        return pick


def oracle(model: str, line: Line) -> Decode | None:
    """What the line decodes to; None where a rounding would decide that."""
    watch, made = Watch(), list[KeptOutputs]()

    def kept(*settings: Any) -> KeptOutputs:
        made.append(KeptOutputs(*settings))
        return made[0]

    with patch.object(uniform, "greedy", watch.greedy), patch.object(uniform, "KeptOutputs", kept):
        decoded = uniform.decode(gidd.load(kinds.checkpoint(model).folder), line)
    narrowest = min(watch.narrowest, *(each.narrowest for each in made), 1.0)
    return None if narrowest < NARROW else decoded


def draw_line(rng: random.Random, model: str) -> Line:
    """Blocks may end beyond the response and beyond the canvas; any token may stand on it, MASK and EOS included."""
    prompt = kinds.tokens(rng, rng.randint(1, 9))
    tokens, block = rng.randint(1, 14), rng.randint(1, 7)
    beyond = rng.choice([0, 1, 5, 12])
    masks = model == "gidd, masks"
    canvas = [kinds.MASK if masks or rng.random() < 0.1 else rng.randrange(40) for _ in range(tokens + beyond)]
    per_step = 1 if masks else rng.choice([1, 2, 3, 9])
    sampling: Line = {
        "max_tokens": tokens,
        "block_length": block,
        "steps_per_block": rng.randint(1, block if masks else block + 2),
        "initial_canvas": canvas,
        "schedule": rng.choice(["cosine", "linear"]),
        "tokens_per_step": per_step,
        "min_tokens": rng.choice([0, 0, tokens // 2]),
    }
    if model == "gidd, open" and rng.random() < 0.7:
        sampling["revision_tokens"] = rng.choice([1, 2, 9])
    cache, config = rng.choice(POLICIES)
    return {"cache": cache, "cache_config": config, "prompt_token_ids": prompt, "sampling": sampling}


def plain(prompt: list[int], cache: str = "none", **sampling: Any) -> Line:
    return {"cache": cache, "cache_config": {}, "prompt_token_ids": prompt, "sampling": sampling}


def drawn(rng: random.Random, model: str) -> tuple[Line, Decode]:
    return first_clear(lambda: draw_line(rng, model), lambda line: oracle(model, line))


def compare(model: str, line: Line, expected: Decode, result: Result) -> None:
    assert result.error is None
    assert list(result.token_ids) == expected.output_ids
    assert result.finish_reason == "length"
    assert trace(result) == [(positions, values) for _, positions, values in expected.transfers]
    assert [transfer.step for transfer in result.trace] == [number for number, _, _ in expected.transfers]
    usage, sampling = result.usage, line["sampling"]
    assert usage.forwards == usage.steps == expected.forwards
    open_ = model == "gidd, open"
    apart = 0  # the oracle leaves out the pass over what stands before a block; ours is one with the first
    if line["cache"] == "block-prefix" and not open_:
        prompt, block = len(line["prompt_token_ids"]), sampling["block_length"]
        apart = sum(range(prompt, prompt + sampling["max_tokens"], block))
    layers = kinds.checkpoint(model).model.config.layers
    assert usage.row_layers == expected.row_layers + apart * layers


def limits(rng: random.Random) -> dict[str, Any]:
    return {
        "max_num_seqs": rng.choice([2, 5, 20]),
        "max_row_layers": rng.choice([None, 20, 150]),
        "page_size": rng.choice([1, 3, 5, 16]),
        "max_model_len": 64,
    }


@pytest.mark.few(11)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", kinds.UNIFORM)
def test_mixed_batches(model: str, seed: int) -> None:
    rng = random.Random(f"{model} {seed}")
    lines = {str(number): drawn(rng, model) for number in range(10)}
    work = [work_of(line, name, rng.randrange(12)) for name, (line, _) in lines.items()]
    rng.shuffle(work)
    results = run(poisoned_engine(kinds.checkpoint(model).model, **limits(rng)), work)
    for name, (line, expected) in lines.items():
        compare(model, line, expected, results[name])


@pytest.mark.parametrize("cache", [("none", {}), ("uniform-cache", {"refresh_next": 2})], ids=str)
def test_uniform_noise_never_answers_with_a_mask(cache: tuple[str, Line]) -> None:
    """Neither what is drawn for the canvas nor what the samplers write."""
    rng = random.Random("masks")
    work = []
    for number in range(12):
        line = draw_line(rng, "gidd") | {"cache": cache[0], "cache_config": cache[1]}
        sampling = line["sampling"]
        del sampling["initial_canvas"]
        if number % 2:
            del sampling["tokens_per_step"]
            sampling["sampler"] = "ancestral"
        sampling |= {"temperature": 1.0, "seed": number, "canvas_length": 40}
        work.append(work_of(line, str(number)))
    results = run(poisoned_engine(kinds.checkpoint("gidd").model, max_num_seqs=12), work)
    assert all(kinds.MASK not in result.token_ids for result in results.values())


def test_a_mask_under_uniform_noise_stays_under_the_adaptive_sampler_and_goes_under_the_ancestral_one() -> None:
    prompt = [1, 2, 3]
    sampling: Line = {"max_tokens": 4, "block_length": 4, "initial_canvas": [kinds.MASK] * 4 + [5] * 6}
    lines: dict[str, Line] = {
        "adaptive": {"tokens_per_step": 4},
        "ancestral": {"sampler": "ancestral", "temperature": 1.0, "seed": 1},
        "greedy": {"sampler": "ancestral"},
    }
    work = [work_of(plain(prompt, **sampling, **more), name) for name, more in lines.items()]
    results = run(poisoned_engine(kinds.checkpoint("gidd").model), work)
    assert results["adaptive"].token_ids == (kinds.MASK,) * 4
    assert kinds.MASK not in results["ancestral"].token_ids + results["greedy"].token_ids


def test_a_settled_token_of_mask_noise_stays_where_the_prediction_rules_it_out() -> None:
    """x_hat(z) is 0 and noise never gave z: the posterior is 0 / 0, and the token stays."""
    torch.manual_seed(0)
    canvas = [7, 8, kinds.MASK, 9, *[kinds.MASK] * 4]
    line = plain([1, 2], max_tokens=4, block_length=4, initial_canvas=canvas, sampler="ancestral")
    result = run(poisoned_engine(kinds.checkpoint("gidd, masks").model), [work_of(line, "x")])["x"]
    assert [result.token_ids[index] for index in (0, 1, 3)] == [7, 8, 9]
    assert result.token_ids[2] != kinds.MASK


EOS = 38


def ends(prompt: list[int], canvas: list[int], tokens: int, **sampling: Any) -> Result:
    """A request that honours its end tokens."""
    line = plain(prompt, max_tokens=tokens, block_length=4, initial_canvas=canvas, ignore_eos=False, **sampling)
    return run(poisoned_engine(kinds.checkpoint("gidd").model), [work_of(line, "x")])["x"]


def test_end_tokens_of_the_prompt_and_of_trailing_noise_do_not_stop() -> None:
    """The original stops at once; here only the response's own count."""
    result = ends([EOS, 1, EOS], [*range(1, 13), EOS, EOS, 5], 12)
    assert (result.finish_reason, len(result.token_ids), result.usage.steps) == ("length", 12, 12)
    assert EOS not in result.token_ids


def test_an_end_token_of_the_response_ends_it_with_its_block() -> None:
    """One that stands in a later block's noise is not final yet. min_tokens bans the writing, not what stands there."""
    whole = ends([1, 2, 3], [*range(1, 13), 5], 12, tokens_per_step=4, steps_per_block=4)
    assert EOS not in whole.token_ids
    wanted = whole.token_ids[5]
    stopped = ends([1, 2, 3], [*range(1, 13), 5], 12, tokens_per_step=4, steps_per_block=4, stop_token_ids=[wanted])
    first = whole.token_ids.index(wanted)
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.usage.steps) == ("stop", (first // 4 + 1) * 4)


def test_a_mask_in_the_prompt_is_a_token_like_any_other() -> None:
    result = ends([kinds.MASK, 2, kinds.MASK], [*range(1, 9), 5], 8)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 8)
