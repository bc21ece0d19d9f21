"""Nemotron-Labs-Diffusion, 3B, 8B and 14B: Ministral 3 that writes from left to right, by blocks, or both.

The shapes of 3B and 14B are those of Ministral 3 of these sizes.

This file follows other programs' implementations of the model. No published checkpoint was read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families import qwen
from remask.families.family import Family, tiny
from remask.families.fields import GROWTH, Fields
from remask.model.config import ModelConfig, RopeScaling

MASK, END, BLOCK = 100, 11, 32  # of the published checkpoints

DRAFTER = "linear_spec_lora"


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    defaults = {"mask_token_id": MASK, "eos_token_id": END, GROWTH: 0.0}
    fields = Fields("config.json (nemotron-labs-diffusion)", raw, **defaults)
    fields.only("attention_bias", False, optional=True)
    fields.only("sliding_window", None, optional=True)
    fields.only("dlm_paradigm", "bidirectional", optional=True)
    return ModelConfig(
        family="nemotron-labs-diffusion",
        shift=1,
        kind="block_causal",
        causal_prefix=True,
        drafter=DRAFTER,
        block_length=fields.block("block_size", BLOCK),
        **qwen.shape(fields, fields.integer("head_dim", least=2)),
    )


# The defaults of Ministral 3 in transformers, whose architecture it is.
_ROPE = RopeScaling("yarn", factor=16.0, length=16384, fast=32.0, growth=0.1)
_8B = ModelConfig(
    family="nemotron-labs-diffusion",
    layers=34,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=131072,
    max_length=262144,
    rope_theta=1_000_000.0,
    rope_scaling=_ROPE,
    norm_eps=1e-5,
    mask_id=MASK,
    stop_ids=(END,),
    shift=1,
    kind="block_causal",
    causal_prefix=True,
    block_length=BLOCK,
)

NEMOTRON = Family(
    name="nemotron-labs-diffusion",
    model_types=("nemotron_labs_diffusion",),
    architectures=("NemotronLabsDiffusionModel",),
    names=replace(
        qwen.NAMES,
        embed="encoder.embed_tokens",
        norm="encoder.norm",
        head="diffusion_head",
        layer="encoder.layers.{}.",
    ),
    config=_config,
    unread=r".*(rotary_emb\.inv_freq|\.[kv]_scale)",
    harmless=frozenset({"dp_varying_mask_ratio"}),
    presets={
        "nemotron-labs-diffusion-3b": replace(_8B, layers=26, hidden=3072, intermediate=9216, tied=True),
        "nemotron-labs-diffusion-8b": _8B,
        "nemotron-labs-diffusion-14b": replace(_8B, layers=40, hidden=5120, intermediate=16384),
        "nemotron-labs-diffusion-tiny": tiny(_8B, block_length=8, rope_scaling=replace(_ROPE, factor=4.0, length=128)),
    },
)
