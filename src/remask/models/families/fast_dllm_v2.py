"""Fast-dLLM v2: block-causal diffusion on the dense Qwen2.5 architecture.

Written from public descriptions of the model. The names of its configuration's keys were not checked against a
checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from remask.models.config import ModelConfig
from remask.models.families import qwen
from remask.models.families.family import Family
from remask.models.families.fields import Fields

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
        block_length=fields.integer("bd_size", BLOCK),
        **qwen.shape(fields, raw, MASK),
    )


FAST_DLLM_V2 = Family(
    name="fast-dllm-v2",
    model_types=("Fast_dLLM_Qwen",),
    architectures=("Fast_dLLM_QwenForCausalLM",),
    names=qwen.NAMES,
    config=_config,
)
