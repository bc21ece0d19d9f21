"""Decoding of uniform models: parameters, blocks, schedules, and the recorded whole generations."""

from typing import Any

import numpy as np
import pytest
import torch

from remask.denoising.noise import Noise, log_snrs
from remask.errors import ConfigError
from remask.plan.canvas import Template
from remask.sampling.decoder import Predictions
from remask.sampling.filters import top_k, top_p
from remask.sampling.uniform import UniformDecoder, UniformDecoding
from remask.sampling.uniform_score import gain, reverse_step
from tests.goldens import uniform as goldens
from tests.oracles.test_uniform_traces import ADAPTIVE, ANCESTRAL, model_of, replay
from tests.sampling_fields import flat_params

MASK, VOCAB, EOS = 3, 40, 1
UNIFORM, MASKS, HYBRID = 1000.0, -1000.0, -5.0


def decoding(
    prompt: int = 5,
    shift: float = UNIFORM,
    length: int = 32,
    seed: int = 0,
    structured: bool = True,
    template: Template | None = None,
    **sampling: Any,
) -> UniformDecoding:
    params = flat_params(**{"max_tokens": 8, **sampling})
    noise = Noise(shift, -9.0, 9.0, VOCAB, MASK)
    return UniformDecoding.of(list(range(4, 4 + prompt)), params, noise, (EOS,), length, seed, structured, template)


def decoder(**given: Any) -> UniformDecoder:
    one = decoding(**given)
    return one.decoder(one.canvas(), "all")


def noisy(walk: UniformDecoder) -> Any:
    """How the rows of the block are weighed or drawn, a `NoisyRows`."""
    positions = np.arange(walk.block.start, walk.block.stop)
    return walk.group(slice(0, len(positions)), positions).noisy


def test_recorded_schedules() -> None:
    recorded = {key: grid for key, grid in goldens.sampling("torch_steps")[1].items() if key.startswith("schedule.")}
    assert len(recorded) >= 4
    for key, expected in recorded.items():
        _, kind, steps = key.split(".")
        np.testing.assert_allclose(log_snrs(kind, int(steps), -9.0, 9.0), expected.numpy(), rtol=0, atol=5e-5)


def of_trace(name: str, row: int) -> UniformDecoding:
    trace = goldens.trace(name)
    given, model, canvas = trace.parameters, model_of(trace), trace.canvas(row).tolist()
    prompt = given["prompt_length"]
    params = flat_params(
        max_tokens=given["max_length"],
        block_length=given["block_length"],
        steps_per_block=given["steps"],
        sampler=given["sampling_method"],
        schedule=given["noise_schedule"],
        temperature=given["temperature"],
        tokens_per_step=given.get("tokens_per_step"),
        min_tokens=given["min_length"],
        initial_canvas=canvas[prompt:],
    )
    noise = Noise(model.noise_shift, *model.log_snr_range, model.vocabulary, model.mask_id)
    return UniformDecoding.of(canvas[:prompt], params, noise, (model.eos_id,), len(canvas), 0)


@pytest.mark.parametrize("strategy", ["prefix", "uniform_r4"])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_recorded_adaptive_steps(name: str, strategy: str) -> None:
    """The oracle's logits go in; gains and chosen positions must be the recorded ones."""
    trace = goldens.trace(name)
    one = of_trace(name, 0)
    canvas = one.canvas()
    walk = one.decoder(canvas, "all")
    for number, step, after in replay(trace, strategy, 0):
        positions = np.arange(walk.block.start, walk.block.stop)
        assert (positions[0], positions[-1] + 1) == (step.start, step.stop)
        rows = noisy(walk)
        assert canvas.tokens[positions].tolist() == step.tokens.tolist() == rows.current.tolist()
        scores = gain(step.logits.float(), step.tokens, torch.from_numpy(rows.weights))
        torch.testing.assert_close(scores, trace.tensors[f"{strategy}.score"][number, 0], rtol=0, atol=5e-6)
        tokens = step.logits.argmax(-1).numpy()
        written = walk.choose(Predictions(positions, tokens, scores.numpy()))
        canvas.write(written, tokens[written - positions[0]])
        assert canvas.tokens[positions].tolist() == after.tolist()
        canvas.settle(walk.outcome(written).final, walk.step)
        walk.advance()
    assert number > 0


@pytest.mark.parametrize("strategy", ["prefix", "uniform_r4"])
@pytest.mark.parametrize("name", ANCESTRAL)
def test_recorded_ancestral_steps(name: str, strategy: str) -> None:
    """The original's draws are forced; the distributions that it drew from must be ours."""
    trace, one = goldens.trace(name), of_trace(name, 0)
    canvas = one.canvas()
    walk = one.decoder(canvas, "all")
    recorded = trace.tensors[f"{strategy}.p_s_given_t"]
    drawn = iter(trace.tensors[f"{strategy}.z_next"][:, 0])
    compared = 0
    for number, step, after in replay(trace, strategy, 0, lambda _: next(drawn)):
        positions = np.arange(walk.block.start, walk.block.stop)
        group = walk.group(slice(0, len(positions)), positions)
        assert canvas.tokens[positions].tolist() == step.tokens.tolist()
        logits = top_p(top_k(step.logits.float() / group.temperature, group.top_k), group.top_p)
        chances = reverse_step(logits, step.tokens, noisy(walk).transition, greedy=False)
        torch.testing.assert_close(chances, recorded[number, 0], rtol=0, atol=1e-5)
        written = walk.choose(Predictions(positions, after.numpy(), np.ones(len(positions), dtype=np.float32)))
        assert written.tolist() == positions[(after != step.tokens).numpy()].tolist()
        canvas.write(positions, after.numpy())
        canvas.settle(walk.outcome(written).final, walk.step)
        walk.advance()
        compared += 1
    assert compared == walk.step == len(recorded)
    assert walk.finished


def test_defaults() -> None:
    one = decoding(max_tokens=300, length=512)
    assert (one.block_length, one.steps, one.per_step, one.length) == (128, 128, 1, 512)
    assert decoding(max_tokens=8).block_length == 8
    assert decoding(block_length=6, tokens_per_step=4).steps == 1
    assert decoding(block_length=6, tokens_per_step=9).steps == 1, "at least one"
    assert decoding(block_length=6, sampler="ancestral").steps == 6
    assert not one.ordered
    assert not one.may_stop_within_block(stop_written=True)


def test_the_canvas_is_the_prompt_and_noise_to_its_end() -> None:
    one = decoding(seed=7)
    canvas = one.canvas()
    assert (len(canvas), canvas.prompt, canvas.end) == (32, 5, 13)
    assert canvas.tokens[:5].tolist() == one.prompt
    assert MASK not in canvas.tokens
    assert canvas.tokens.tolist() == decoding(seed=7).canvas().tokens.tolist()
    assert canvas.tokens.tolist() != decoding(seed=8).canvas().tokens.tolist()
    assert (decoding(shift=MASKS).canvas().tokens[5:] == MASK).all()
    given = decoding(initial_canvas=[MASK, EOS, *range(4, 12)]).canvas()
    assert given.tokens[5:].tolist() == [MASK, EOS, *range(4, 12)]
    assert decoding(canvas_length=13).length == 13


def test_clean_rows_see_clean_rows_and_noise_sees_everything() -> None:
    walk = decoder(block_length=4, steps_per_block=1)
    assert (walk.context.sees is not None and walk.context.sees.tolist()) == [5] * 5 + [32] * 27
    walk.advance()
    assert (walk.context.sees is not None and walk.context.sees.tolist()) == [9] * 9 + [32] * 23


def test_every_block_walks_from_full_noise_to_none() -> None:
    walk = decoder(block_length=4, steps_per_block=3, max_tokens=6, sampler="ancestral", schedule="linear")
    grid, seen = log_snrs("linear", 3, -9.0, 9.0), []
    blocks = []
    while not walk.finished:
        transition = noisy(walk).transition
        seen.append((transition.log_snr, transition.next_log_snr))
        blocks.append((walk.block.start, walk.block.stop))
        last = len(walk.outcome(np.empty(0, dtype=np.int64)).final)
        assert last == (4 if walk.block_step == 2 else 0)
        walk.advance()
    assert blocks == [(5, 9)] * 3 + [(9, 13)] * 3, "the last block reaches beyond the response"
    assert seen == [(grid[3], grid[2]), (grid[2], grid[1]), (grid[1], grid[0])] * 2
    assert walk.step == 6
    assert walk.context.order is None


def test_a_block_ends_with_the_canvas() -> None:
    walk = decoder(block_length=6, canvas_length=13, steps_per_block=1)
    walk.advance()
    assert walk.block == range(11, 13)


def test_positions_that_gain_nothing_are_not_written() -> None:
    walk = decoder(tokens_per_step=3)
    positions = np.arange(5, 13)
    current = decoding().canvas().tokens[positions]
    tokens = np.where(np.arange(8) == 2, current, current + 1)
    scores = np.array([0.1, 0.0, 0.9, 0.0, 0.3, 0.2, 0.0, 0.0], dtype=np.float32)
    assert walk.choose(Predictions(positions, tokens, scores)).tolist() == [9, 10], "the best one changes no token"
    assert walk.choose(Predictions(positions, tokens, np.zeros(8, dtype=np.float32))).tolist() == []


def test_weights_are_priors_over_the_block() -> None:
    for shift, canvas, expected in (
        (UNIFORM, [MASK, 4, 5, 6], [0, 1 / 3, 1 / 3, 1 / 3]),
        (MASKS, [MASK, MASK, 5, 6], [0.5, 0.5, 0, 0]),
        (MASKS, [4, 4, 5, 6], [0, 0, 0, 0]),
    ):
        walk = decoder(shift=shift, max_tokens=4, initial_canvas=canvas, steps_per_block=2)
        assert noisy(walk).weights.tolist() == pytest.approx(expected)


def test_end_tokens_are_banned_before_min_tokens() -> None:
    walk = decoder(block_length=4, min_tokens=6, steps_per_block=1)
    banned = []
    while not walk.finished:
        assert noisy(walk).banned == (EOS,)
        banned.append(noisy(walk).banned_rows)
        walk.advance()
    assert banned == [4, 2]


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"canvas_length": 12},
        "canvas_length=12 is shorter than the prompt of 5 tokens and max_tokens=8 together; use 13",
    ),
    ({"initial_canvas": [4] * 7}, "canvas_length=12 is shorter"),
    ({"initial_canvas": [4] * 9, "canvas_length": 15}, "must hold the 10 tokens of the canvas after the prompt, got 9"),
    ({"initial_canvas": [4] * 7 + [VOCAB]}, f"initial_canvas holds {VOCAB}; token ids go from 0 to {VOCAB - 1}"),
    ({"sampler": "ancestral", "tokens_per_step": 2}, "tokens_per_step is the adaptive sampler's"),
    (
        {"shift": MASKS, "block_length": 4, "steps_per_block": 3, "tokens_per_step": 2},
        "steps_per_block=3 times tokens_per_step=2 is more than the 4 masks of a block",
    ),
    ({"shift": MASKS, "block_length": 4, "tokens_per_step": 5}, "more than the 4 masks of a block"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_parameters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoding(**given)


def test_only_the_adaptive_sampler_on_masks_alone_is_held_to_the_block() -> None:
    more: dict[str, Any] = {"block_length": 4, "steps_per_block": 3}
    for shift in (UNIFORM, HYBRID):
        assert decoding(shift=shift, tokens_per_step=2, **more).steps == 3
    assert decoding(shift=MASKS, **more).steps == 3
    assert decoding(shift=MASKS, sampler="ancestral", block_length=4, steps_per_block=9).steps == 9


REVISED: dict[str, Any] = {"block_length": 4, "steps_per_block": 4, "revision_tokens": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "trained under structured attention"),
        ({"structured": False, "sampler": "ancestral"}, "is the adaptive sampler's"),
        ({"structured": False, "shift": MASKS}, "masks alone"),
        ({"structured": False, "template": Template.plain(8)}, "a canvas has fixed parts"),
    ],
)
def test_revisions_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"revision_tokens=2.*{message}"):
        decoding(**REVISED, **given)


def test_revisions_keep_every_block_open_to_the_end() -> None:
    """At a border the view's block holds completed ones; nothing is final before the last step of all."""
    more: dict[str, Any] = {"block_length": 4, "steps_per_block": 2, "tokens_per_step": 2, "revision_tokens": 1}
    walk = decoder(prompt=2, length=16, structured=False, **more)
    canvas, told = walk.canvas, []
    while not walk.finished:
        positions = np.arange(walk.block.start, walk.block.stop)
        tokens = canvas.tokens[positions] ^ 1  # every proposal is another token
        written = walk.choose(Predictions(positions, tokens, np.linspace(0.9, 0.5, len(positions), dtype=np.float32)))
        outcome = walk.outcome(written)
        assert outcome.edits is not None
        fresh = walk.context.fresh
        told.append((walk.block, fresh, written.tolist(), outcome.edits.tolist(), len(outcome.final)))
        assert walk.context.sees is None
        walk.advance()
    assert told == [
        (range(2, 6), None, [2, 3], [], 0),
        (range(2, 6), None, [2, 3], [], 0),
        (range(2, 10), range(6, 10), [2, 6, 7], [2], 0),
        (range(6, 10), None, [6, 7], [], 8),
    ]
    assert (walk.context.fresh, len(walk.block)) == (None, 0)
