"""Nemotron-Labs-Diffusion, 3B, 8B and 14B: Ministral 3 that writes from left to right, by blocks, or both.

The shapes of 3B and 14B are those of Ministral 3 of these sizes.

This file follows other programs' implementations of the model. No published checkpoint was read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import GROWTH, Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig, RopeScaling

MASK, END, BLOCK = 100, 11, 32  # of the published checkpoints

DRAFTER = "linear_spec_lora"
_SWITCHES: Mapping[str, Any] = {"shift": 1, "kind": "block_causal", "causal_prefix": True}


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`, whose mask, end and block are the published ones by default."""
    defaults = {"mask_token_id": MASK, "eos_token_id": END, GROWTH: 0.0}
    fields = Fields("config.json (nemotron-labs-diffusion)", raw, **defaults)
    fields.only("attention_bias", False, optional=True)
    fields.only("sliding_window", None, optional=True)
    fields.only("dlm_paradigm", "bidirectional", optional=True)
    return ModelConfig(
        family="nemotron-labs-diffusion",
        drafter=DRAFTER,
        block_length=fields.block("block_size", BLOCK),
        **_SWITCHES,
        **qwen.shape(fields, fields.integer("head_dim", least=2)),
    )


# The defaults of Ministral 3 in transformers, whose architecture it is.
_ROPE = RopeScaling("yarn", factor=16.0, length=16384, fast=32.0, growth=0.1)

NEMOTRON = Family(
    name="nemotron-labs-diffusion",
    model_types=("nemotron_labs_diffusion",),
    architectures=("NemotronLabsDiffusionModel",),
    names=replace(
        qwen.NAMES, embed="encoder.embed_tokens", norm="encoder.norm", head="diffusion_head", layer="encoder.layers.{}."
    ),
    config=_config,
    unread=r".*(rotary_emb\.inv_freq|\.[kv]_scale)",
    harmless=frozenset({"dp_varying_mask_ratio"}),
    presets=shapes_of(
        "nemotron-labs-diffusion",
        {"nemotron-labs-diffusion-tiny": {"rope_scaling": replace(_ROPE, factor=4.0, length=128)}},
        rope_scaling=_ROPE,
        **_SWITCHES,
    ),
)
