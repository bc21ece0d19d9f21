"""What must hold for the uniform-diffusion oracle beyond the recorded cases."""

from typing import Any

import pytest
import torch

from tests.goldens import uniform as goldens
from tests.oracles.canvas import Decode
from tests.oracles.decode import decode, load
from tests.oracles.gidd import GiddModel, structured

EACH_MODEL = pytest.mark.parametrize("name", goldens.MODELS)


def golden_model(name: str) -> GiddModel:
    model = load(goldens.model_dir(name))
    assert isinstance(model, GiddModel)
    return model


def ask(model: GiddModel, cache: str, config: dict[str, Any] | None = None, **sampling: Any) -> Decode:
    """Decodes a request of 5 prompt and 14 response tokens on the model's canvas; noise is drawn with a fixed seed."""
    drawn = torch.Generator().manual_seed(3)
    prompt = torch.randint(4, model.vocabulary, (5,), generator=drawn).tolist()
    noise = torch.randint(0, model.vocabulary, (model.canvas_length - 5,), generator=drawn)
    pure_mask = model.noise_shift < 0
    line = {
        "prompt_token_ids": prompt,
        "cache": cache,
        "cache_config": config or {},
        "sampling": {
            "max_tokens": 14,
            "block_length": 6,
            "steps_per_block": 4,
            "tokens_per_step": 1 if pure_mask else 2,
            "initial_canvas": [model.mask_id] * len(noise) if pure_mask else noise.tolist(),
        }
        | sampling,
    }
    return decode(model, line)


@EACH_MODEL
def test_the_prefix_cache_changes_nothing(name: str) -> None:
    model = golden_model(name)
    plain, cached = ask(model, "none"), ask(model, "block-prefix")
    assert (cached.output_ids, cached.transfers) == (plain.output_ids, plain.transfers)
    assert [rows[0] for rows in cached.rows[::4]] == [model.canvas_length - start for start in (5, 11, 17)]


@EACH_MODEL
def test_uniform_cache_with_one_step_a_block_caches_nothing(name: str) -> None:
    model = golden_model(name)
    assert ask(model, "uniform-cache", {"refresh_next": 1}, steps_per_block=1) == ask(model, "none", steps_per_block=1)


@EACH_MODEL
def test_a_last_block_has_no_next_one_to_refresh(name: str) -> None:
    model = golden_model(name)
    never, always, second = (
        [rows[0] for rows in ask(model, "uniform-cache", {"refresh_next": interval}).rows] for interval in (0, 1, 2)
    )
    full = model.canvas_length
    assert never == [full, 6, 6, 6] * 3
    assert always == [full, 12, 12, 12] * 2 + [full, 6, 6, 6]
    assert second == [full, 12, 6, 12] * 2 + [full, 6, 6, 6]


def test_the_response_is_cut_inside_a_block_and_the_noise_beyond_is_kept() -> None:
    model = golden_model("unif")
    short, long = ask(model, "none", max_tokens=13), ask(model, "none", max_tokens=18)
    assert len(short.output_ids) == 13
    assert short.output_ids == long.output_ids[:13]
    assert short.transfers == long.transfers


def test_end_of_text_is_not_chosen_before_min_tokens() -> None:
    model = golden_model("unif")
    favoured = GiddModel(goldens.model_dir("unif"))
    favoured.output[model.eos_id] = favoured.output.sum(0) * 4
    open_ended = ask(favoured, "none", tokens_per_step=6)
    assert model.eos_id in open_ended.output_ids[:6]
    banned = ask(favoured, "none", tokens_per_step=6, min_tokens=14)
    chosen = {
        (place, token) for _, places, tokens in banned.transfers for place, token in zip(places, tokens, strict=True)
    }
    # The last block reaches four positions beyond the response.
    assert {5 + 14} < {place for place, token in chosen if token == model.eos_id} <= set(range(5 + 14, 5 + 18))
    assert model.mask_id not in {token for _, token in chosen}


def test_clean_rows_do_not_see_noise() -> None:
    model = golden_model("hybrid")
    tokens = torch.arange(20) + 4
    noisy = torch.arange(20) >= 8
    before = model.forward(tokens, visible=structured(noisy))
    after = model.forward(tokens.where(~noisy, 50), visible=structured(noisy))
    assert torch.equal(before.logits[:8], after.logits[:8])
    assert not torch.equal(before.logits[8:], after.logits[8:])
    torch.testing.assert_close(model.forward(tokens[:8]).logits, before.logits[:8])
