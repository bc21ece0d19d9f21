"""Which sampling parameters mean something on which kind of model: every one of them, both ways."""

import re
from typing import Any

import pytest

from remask.checks import ModelKind
from remask.checks.fields import paths
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams, merge_sampling
from remask.sampling.defaults import check_fields

KINDS: tuple[ModelKind, ...] = ("masked", "uniform", "block_causal")
VALUES: dict[str, tuple[Any, tuple[ModelKind, ...]]] = {
    "steps": (8, ("masked",)),
    "remasking.eps": (0.1, ("masked",)),
    "remasking.factor": (0.5, ("masked",)),
    "cfg_scale": (1.0, ("masked",)),
    "blocks.growing_canvas": (True, ("masked",)),
    "threshold": (0.5, ("masked", "block_causal")),
    "remasking.fallback": ("leftmost", ("block_causal",)),
    "blocks.sub_block_length": (4, ("block_causal",)),
    "remasking.eb_threshold": (0.4, ("block_causal",)),
    "blocks.early_stop": (True, ("block_causal",)),
    "uniform.sampler": ("adaptive", ("uniform",)),
    "uniform.tokens_per_step": (2, ("uniform",)),
    "uniform.schedule": ("linear", ("uniform",)),
    "uniform.canvas_length": (64, ("uniform",)),
    "uniform.initial_canvas": ([1], ("uniform",)),
    "uniform.min_log_snr": (-4.0, ("uniform",)),
    "uniform.max_log_snr": (4.0, ("uniform",)),
    "uniform.anchor": (False, ("uniform",)),
    "uniform.trim": (False, ("uniform",)),
    "uniform.frozen": ([[3, 4]], ("uniform",)),
    "uniform.denoise_end": (9, ("uniform",)),
    "mode": ("ar", ("block_causal",)),
    "speculation.draft_window": (4, ("block_causal",)),
    "speculation.max_draft_window": (8, ("block_causal",)),
    "speculation.lora": (False, ("block_causal",)),
    "renoising.t_max": (0.9, ("block_causal",)),
    "renoising.t_min": (0.2, ("block_causal",)),
    "renoising.entropy_bound": (0.2, ("block_causal",)),
    "renoising.stability_threshold": (2, ("block_causal",)),
    "renoising.confidence_threshold": (0.01, ("block_causal",)),
    "min_tokens": (3, KINDS),
    "uniform.correction_steps": (4, ("uniform",)),
    "uniform.revision_tokens": (2, ("uniform",)),
    "uniform.preset": ("s32/b32", ("uniform",)),
    "max_tokens": (3, KINDS),
    "steps_per_block": (3, KINDS),
    "block_length": (3, KINDS),
    "temperature": (0.5, KINDS),
    "top_k": (3, KINDS),
    "top_p": (0.5, KINDS),
    "min_p": (0.1, KINDS),
    "logit_bias": ({3: 1.0}, KINDS),
    "repetition_penalty": (1.5, ("masked", "block_causal")),
    "frequency_penalty": (0.5, ("masked", "block_causal")),
    "presence_penalty": (0.5, ("masked", "block_causal")),
    "seed": (3, KINDS),
    "stop": ("x", KINDS),
    "include_stop_str_in_output": (True, KINDS),
    "stop_token_ids": ([3], KINDS),
    "ignore_eos": (True, KINDS),
}
REMASKING: dict[str, tuple[ModelKind, ...]] = {
    "low_confidence": ("masked", "block_causal"),
    "random": ("masked",),
    "entropy": ("masked",),
    "topk_margin": ("masked",),
    "maskgit_plus": ("masked",),
    "origin": ("masked",),
    "sequential": ("block_causal",),
    "bound": ("block_causal",),
    "cumulative": ("block_causal",),
    "entropy_bounded": ("block_causal",),
    "joint_threshold": ("block_causal",),
    "levenshtein": ("block_causal",),
    "joint_threshold_indel": ("block_causal",),
}
OF_EDITS = {
    "remasking.edit_threshold",
    "remasking.max_post_steps",
    "remasking.max_steps_per_block",
    "remasking.min_transfer",
    "remasking.penalty_lambda",
}  # not set without a rule that has them
OF_CORRECTIONS = {
    "uniform.correction_temperature",
    "uniform.correction_tokens",
    "uniform.correction_patience",
}  # not without correction_steps


def test_no_parameter_is_left_out_of_this_table() -> None:
    assert (
        set(paths(SamplingParams))
        == set(VALUES)
        | {
            "remasking.rule",
            "remasking.order",
            "remasking.config",
        }
        | OF_CORRECTIONS
        | OF_EDITS
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VALUES)
def test_parameters(name: str, kind: ModelKind) -> None:
    value, kinds = VALUES[name]
    params = SamplingParams.from_mapping(merge_sampling({name: value}))
    if kind in kinds:
        check_fields(params, kind)
        return
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(name)} is for .* models, and this one is {kind.replace('_', '-')}; leave"
    ):
        check_fields(params, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REMASKING)
def test_rules(name: str, kind: ModelKind) -> None:
    params = SamplingParams(remasking=name)
    if kind in REMASKING[name]:
        check_fields(params, kind)
        return
    with pytest.raises(ConfigError, match=f"remasking.* .*{kind.replace('_', '-')}"):
        check_fields(params, kind)


def test_an_order_is_for_masked_models() -> None:
    params = SamplingParams(remasking={"rule": "order", "order": [[3]]})
    check_fields(params, "masked")
    with pytest.raises(ConfigError, match="order is for masked models, and this one is block-causal"):
        check_fields(params, "block_causal")
