"""The blocks that a decoding names before it begins are those that its decoder goes through."""

from typing import Any, Protocol

import numpy as np
import pytest

from remask.plan.canvas import Canvas
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.block_causal import BlockCausalDecoding
from remask.sampling.decoder import Decoder, Decoding
from remask.sampling.masked import MaskedDecoding
from remask.sampling.noise import Noise
from remask.sampling.uniform import UniformDecoding

MASK, PROMPT = 3, [1] * 5


class Make(Protocol):
    def __call__(self, **sampling: Any) -> Decoding: ...


def masked(**sampling: Any) -> Decoding:
    return MaskedDecoding.of(PROMPT, SamplingParams(**sampling), SamplingDefaults(), MASK, 0, blockwise=True)


def block_causal(**sampling: Any) -> Decoding:
    return BlockCausalDecoding.of(PROMPT, SamplingParams(**sampling), SamplingDefaults(), 4, MASK, 0)


def uniform(**sampling: Any) -> Decoding:
    return UniformDecoding.of(PROMPT, SamplingParams(**sampling), Noise(1000.0, -9.0, 9.0, 40, MASK), (2,), 64, 0)


def step(canvas: Canvas, decoder: Decoder) -> None:
    """One step in which the model is sure of token 9 everywhere."""
    positions = np.array([place for place in decoder.block if canvas.noisy[place]], dtype=np.int64)
    sure = np.ones(len(positions), dtype=np.float32)
    chosen = decoder.choose(positions, np.full(len(positions), 9), sure)
    canvas.write(chosen, np.full(len(chosen), 9))
    canvas.settle(decoder.final(chosen), decoder.step)
    decoder.advance()


@pytest.mark.parametrize("make", [masked, block_causal, uniform])
@pytest.mark.parametrize(("tokens", "length"), [(8, 4), (8, 8), (8, 1), (8, 2)])
def test_a_decoder_goes_through_the_named_blocks(make: Make, tokens: int, length: int) -> None:
    decoding = make(max_tokens=tokens, block_length=length)
    canvas = decoding.canvas()
    decoder = decoding.decoder(canvas, "all")
    seen: list[range] = []
    for _ in range(decoding.total_steps):
        if decoder.finished:
            break
        if not seen or seen[-1] != decoder.block:
            seen.append(decoder.block)
        step(canvas, decoder)
    assert decoder.finished
    assert decoding.block_ranges == seen
    assert set(range(5, 5 + tokens)) <= {place for block in seen for place in block}


def test_the_last_block_of_a_uniform_model_may_reach_beyond_the_response() -> None:
    assert uniform(max_tokens=6, block_length=4).block_ranges == [range(5, 9), range(9, 13)]


def test_the_first_block_of_a_block_causal_model_may_begin_in_the_prompt() -> None:
    assert block_causal(max_tokens=6).block_ranges == [range(4, 8), range(8, 12)]
