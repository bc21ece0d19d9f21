"""SDAR: block-causal diffusion on the dense Qwen3 architecture, 1.7B, 4B and 8B."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.models.config import ModelConfig
from remask.models.families import qwen
from remask.models.families.family import Family
from remask.models.families.fields import Fields

MASK = 151669  # of the published vocabulary


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (sdar)", raw)
    fields.only("attention_bias", False, optional=True)
    return ModelConfig(
        family="sdar",
        head_dim=fields.integer("head_dim", least=2),
        kind="block_causal",
        qk_norm="head",
        block_length=None if raw.get("block_size") is None else fields.integer("block_size"),
        **qwen.shape(fields, raw, MASK),
    )


SDAR = Family(
    name="sdar",
    model_types=("sdar",),
    architectures=("SDARForCausalLM",),
    names=replace(qwen.NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    config=_config,
)
