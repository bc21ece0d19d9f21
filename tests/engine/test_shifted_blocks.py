"""Block-causal models whose rows predict the next position (Fast-dLLM v2): first tokens come from commit passes."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remask import LLM, EngineConfig, SamplingParams
from tests.sampling_fields import flat_params

BLOCK, PART = 8, 4


@pytest.fixture(scope="module")
def llm() -> LLM:
    made = LLM("fast-dllm-v2-tiny", load_format="dummy", dtype="float32", engine=EngineConfig(max_num_seqs=5))
    generator = torch.Generator().manual_seed(3)
    for layer in made.loaded.weights.layers:  # lively, so that tokens depend on one another
        for tensor in (layer.qkv, layer.qkv_bias, layer.out, layer.gate_up, layer.down):
            assert tensor is not None
            tensor.normal_(0, 0.25, generator=generator)
    made.loaded.weights.embed.normal_(0, 1, generator=generator)
    return made


def logits(llm: LLM, tokens: list[int]) -> Tensor:
    """All rows in one dense pass, float64; row i predicts position i + 1."""
    c, w = llm.loaded.config, llm.loaded.weights
    at = torch.arange(len(tokens))
    hidden = (at // BLOCK)[:, None] < (at // BLOCK)[None, :]
    half = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
    angles = at[:, None, None] / c.rope_theta**half

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.norm_eps) * weight.double()

    def rope(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    x = w.embed.double()[tokens]
    for layer in w.layers:
        assert layer.qkv_bias is not None
        assert layer.attn_norm is not None
        qkv = norm(x, layer.attn_norm) @ layer.qkv.double().T + layer.qkv_bias.double()
        heads = qkv.view(len(tokens), -1, c.head_dim)
        q, k, v = heads[:, : c.heads], heads[:, c.heads : c.heads + c.kv_heads], heads[:, c.heads + c.kv_heads :]
        q, k, v = rope(q), *(y.repeat_interleave(c.heads // c.kv_heads, 1) for y in (rope(k), v))
        scores = torch.einsum("nhd,thd->hnt", q, k) / c.head_dim**0.5
        attended = torch.einsum("hnt,thd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        x = x + attended.flatten(1) @ layer.out.double().T
        gate, up = (norm(x, layer.ffn_norm) @ layer.gate_up.double().T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ layer.down.double().T
    return norm(x, w.norm) @ w.head.double().T


def decode(llm: LLM, prompt: list[int], length: int, threshold: float, part: int | None) -> list[int]:
    """The whole sequence is recomputed in each pass, from the description of the authors' loop."""
    mask = llm.loaded.config.mask_id
    blocks = -(-(len(prompt) + length) // BLOCK)
    tokens = [*prompt, *[mask] * (blocks * BLOCK - len(prompt))]
    for block in range(len(prompt) // BLOCK, blocks):
        start, stop = block * BLOCK, (block + 1) * BLOCK
        if tokens[start] == mask and start >= len(prompt):
            out = logits(llm, tokens[:start])[-1]
            out[mask] = -torch.inf
            tokens[start] = int(out.argmax())
        open_ = [p for p in range(start, stop) if p > max(start, len(prompt) - 1)]
        while open_:
            out = logits(llm, tokens[:stop])
            probabilities = out.softmax(-1)
            out[:, mask] = -torch.inf
            here = open_ if part is None else [p for p in open_ if p < start + ((open_[0] - start) // part + 1) * part]
            best = {p: int(out[p - 1].argmax()) for p in here}
            sure = {p: float(probabilities[p - 1, best[p]]) for p in here}
            chosen = [p for p in here if sure[p] > threshold] or [max(here, key=lambda p: sure[p])]
            for p in chosen:
                tokens[p] = best[p]
            open_ = [p for p in open_ if p not in chosen]
    return tokens[len(prompt) : len(prompt) + length]


def cases(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared = [rng.randrange(250) for _ in range(40)]
    made = []
    for _ in range(8):
        prompt = shared[: rng.choice([0, 16, 24, 40])] + [rng.randrange(250) for _ in range(rng.randint(1, 20))]
        made.append(
            {
                "prompt": prompt[: rng.choice([len(prompt), max(1, len(prompt) // BLOCK * BLOCK)])],
                "length": rng.randint(1, 20),
                "threshold": rng.choice([0.02, 0.1, 0.9]),
                "part": rng.choice([None, PART]),
            }
        )
    return made


@pytest.mark.few(3)
@pytest.mark.parametrize("cache", ["none", "exact"])
@pytest.mark.parametrize("seed", range(3))
def test_random_requests_equal_the_dense_loop(llm: LLM, cache: str, seed: int) -> None:
    made = cases(seed)
    params = [
        flat_params(
            max_tokens=case["length"],
            threshold=case["threshold"],
            sub_block_length=case["part"],
            steps_per_block=BLOCK,
            ignore_eos=True,
        )
        for case in made
    ]
    outputs = llm.generate([case["prompt"] for case in made], params, cache=cache)
    for case, output in zip(made, outputs, strict=True):
        assert list(output.token_ids) == decode(llm, case["prompt"], case["length"], case["threshold"], case["part"])


def test_a_prompt_that_is_stored_whole_still_gives_the_first_token(llm: LLM) -> None:
    prompt = list(range(100, 148))  # six blocks, three pages
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, again = (llm.generate(prompt, params, cache="exact")[0] for _ in range(2))
    assert again.usage.cached_tokens == 48
    assert first.token_ids == again.token_ids == tuple(llm.generate(prompt, params, cache="none")[0].token_ids)
