"""Which sampling parameters mean something on which kind of model: every one of them, both ways."""

from dataclasses import fields
from typing import Any

import pytest

from remask.checks.kinds import ModelKind
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask.sampling.kind_fields import check_fields

KINDS: tuple[ModelKind, ...] = ("masked", "uniform", "block_causal")
VALUES: dict[str, tuple[Any, tuple[ModelKind, ...]]] = {
    "steps": (8, ("masked",)),
    "eps": (0.1, ("masked",)),
    "factor": (0.5, ("masked",)),
    "speculate": (4, ("masked",)),
    "cfg_scale": (1.0, ("masked",)),
    "growing_canvas": (True, ("masked",)),
    "threshold": (0.5, ("masked", "block_causal")),
    "fallback": ("leftmost", ("block_causal",)),
    "sub_block_length": (4, ("block_causal",)),
    "eb_threshold": (0.4, ("block_causal",)),
    "early_stop": (True, ("block_causal",)),
    "sampler": ("adaptive", ("uniform",)),
    "tokens_per_step": (2, ("uniform",)),
    "schedule": ("linear", ("uniform",)),
    "canvas_length": (64, ("uniform",)),
    "initial_canvas": ([1], ("uniform",)),
    "min_tokens": (3, ("uniform",)),
    "correction_steps": (4, ("uniform",)),
    "revision_tokens": (2, ("uniform",)),
    "preset": ("s32/b32", ("uniform",)),
    "max_tokens": (3, KINDS),
    "steps_per_block": (3, KINDS),
    "block_length": (3, KINDS),
    "temperature": (0.5, KINDS),
    "top_k": (3, KINDS),
    "top_p": (0.5, KINDS),
    "min_p": (0.1, KINDS),
    "logit_bias": ({3: 1.0}, KINDS),
    "repetition_penalty": (1.5, ("block_causal",)),
    "frequency_penalty": (0.5, ("block_causal",)),
    "presence_penalty": (0.5, ("block_causal",)),
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
    "entropy_bounded": ("block_causal",),
    "joint_threshold": ("block_causal",),
}
OF_EDITS = {"edit_threshold", "max_post_steps", "min_transfer", "penalty_lambda"}  # not set without joint_threshold
OF_CORRECTIONS = {
    "correction_temperature",
    "correction_tokens",
    "correction_patience",
}  # not without correction_steps


def test_no_parameter_is_left_out_of_this_table() -> None:
    assert {field.name for field in fields(SamplingParams)} == set(VALUES) | {
        "remasking",
        "order",
        "slowfast",
    } | OF_CORRECTIONS | OF_EDITS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VALUES)
def test_parameters(name: str, kind: ModelKind) -> None:
    value, kinds = VALUES[name]
    params = SamplingParams(**{name: value})
    if kind in kinds:
        check_fields(params, kind)
        return
    with pytest.raises(
        ConfigError, match=rf"^{name} is for .* models, and this one is {kind.replace('_', '-')}; leave"
    ):
        check_fields(params, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REMASKING)
def test_rules(name: str, kind: ModelKind) -> None:
    params = SamplingParams(remasking=name)
    if kind in REMASKING[name]:
        check_fields(params, kind)
        return
    with pytest.raises(ConfigError, match=f"remasking .*{kind.replace('_', '-')}"):
        check_fields(params, kind)


def test_an_order_is_for_masked_models() -> None:
    params = SamplingParams(remasking="order", order=[[3]])
    check_fields(params, "masked")
    with pytest.raises(ConfigError, match="order is for masked models, and this one is block-causal"):
        check_fields(params, "block_causal")
