"""The thesis's settings by their names: what they clash with, and that they change what is run."""

import pytest

from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask.sampling.defaults import fit_defaults


@pytest.mark.thorough
def test_a_preset_changes_what_is_run() -> None:
    llm = LLM("bundled-uniform", dtype="float32", device="cpu")
    (usual,) = llm.generate(["figs Lima"], {"max_tokens": 36}, cache="none")
    (named,) = llm.generate(["figs Lima"], {"max_tokens": 32, "uniform": "s32/b32"}, cache="none")
    assert usual.usage.steps == 72  # six blocks of 12 steps
    assert named.usage.steps == 32
    (long,) = llm.generate(["figs Lima"], {"max_tokens": 48, "uniform": "s32/b32"}, cache="none")
    assert long.usage.steps == 64, "two blocks of 32 steps"
    params = llm.session.params({"uniform": "s32/b32"}, prompt_tokens=12)
    assert params.block_length == 32, "the checkpoint's block of 6 gives way"


def test_the_ancestral_sampler_takes_its_blocks_and_steps() -> None:
    params = SamplingParams(uniform={"preset": "s512/b512", "sampler": "ancestral"})
    assert (params.steps_per_block, params.block_length, params.uniform.tokens_per_step) == (512, 512, None)


def test_own_values_and_presets_give_way_as_defaults_and_clash_as_requests() -> None:
    usual = {"uniform": "s32/b32", "max_tokens": 64}
    assert fit_defaults(usual, {}, 999).block_length == 32
    assert fit_defaults(usual, {"block_length": 16}, 999).uniform.preset is None
    assert fit_defaults({"block_length": 8, "uniform": {"tokens_per_step": 1}}, usual, 999).uniform.tokens_per_step == 3
    assert SamplingParams(uniform="s32/b32", block_length=32).block_length == 32
    with pytest.raises(ConfigError, match="preset 's32/b32' sets block_length=32, got block_length=16"):
        SamplingParams(uniform="s32/b32", block_length=16)
    with pytest.raises(ConfigError, match="preset"):
        SamplingParams(uniform="s64/b64")
