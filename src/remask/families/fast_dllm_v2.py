"""Fast-dLLM v2: block-causal diffusion on the dense Qwen2.5 architecture.

This file follows public descriptions of the model. The names of the configuration's keys were not compared with a
checkpoint.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import BLOCK as MAX_BLOCK
from remask.families.fields import Fields
from remask.model.config import ModelConfig

MASK = 151665  # of the published vocabulary
BLOCK = 32


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    if raw.get("mask_token_id") is None:
        raw = {**raw, "mask_token_id": MASK}
    fields = Fields("config.json (fast-dllm-v2)", raw)
    return ModelConfig(
        family="fast-dllm-v2",
        head_dim=fields.head_dim("hidden_size", "num_attention_heads"),
        qkv_bias=True,
        shift=1,
        kind="block_causal",
        block_length=fields.integer("bd_size", BLOCK, most=MAX_BLOCK),
        **qwen.shape(fields, raw, MASK),
    )


_FAST_DLLM_V2_7B = ModelConfig(
    family="fast-dllm-v2",
    max_length=32768,
    mask_id=MASK,
    kind="block_causal",
    block_length=BLOCK,
    **qwen.SHAPE_7B,
)

_FAST_DLLM_V2_TINY = replace(
    _FAST_DLLM_V2_7B,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=160,
    vocab=256,
    max_length=512,
    mask_id=255,
    stop_ids=(250,),
    tied=True,
    block_length=8,
)

FAST_DLLM_V2 = Family(
    name="fast-dllm-v2",
    model_types=("Fast_dLLM_Qwen",),
    architectures=("Fast_dLLM_QwenForCausalLM",),
    names=qwen.NAMES,
    config=_config,
    presets={
        "fast-dllm-v2-7b": _FAST_DLLM_V2_7B,
        "fast-dllm-v2-tiny": _FAST_DLLM_V2_TINY,
    },
)
