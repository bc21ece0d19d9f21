"""Fast-dLLM v2: block-causal diffusion on the dense Qwen2.5 architecture.

This file follows public descriptions of the model. The names of the configuration's keys were not compared with a
checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

MASK = 151665  # of the published vocabulary
BLOCK = 32
_SWITCHES: Mapping[str, Any] = {
    "qkv_bias": True,
    "shift": 1,
    "kind": "block_causal",
    "sampling": SamplingDefaults(opens_blocks=True),
}


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (fast-dllm-v2)", raw, mask_token_id=MASK)
    return ModelConfig(
        family="fast-dllm-v2",
        block_length=fields.block("bd_size", BLOCK),
        **_SWITCHES,
        **qwen.shape(fields, fields.head_dim(), MASK),
    )


FAST_DLLM_V2 = Family(
    name="fast-dllm-v2",
    model_types=("Fast_dLLM_Qwen",),
    architectures=("Fast_dLLM_QwenForCausalLM",),
    names=qwen.NAMES,
    config=_config,
    harmless=frozenset(),
    presets=shapes_of("fast-dllm-v2", **_SWITCHES),
)
