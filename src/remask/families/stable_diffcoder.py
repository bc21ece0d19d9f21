"""Stable-DiffCoder (8B, base and instruct): block-causal diffusion for code, on Llama's architecture.

`model_type` is Llama's; `architectures` and `auto_map` tell it from one. This file follows public descriptions of the
model and of its files. Neither was compared with a checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import Fields
from remask.families.illada import END, MASK
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

BLOCK = 4
CLASS, MODULE = "StableDiffcoderForCausalLM", "modeling_stable_diffcoder"
_SWITCHES: Mapping[str, Any] = {
    "kind": "block_causal",
    "sampling": SamplingDefaults(schedule="masks", whole_blocks=False),
}


def _recognises(raw: Mapping[str, Any]) -> bool:
    classes, code = raw.get("architectures"), raw.get("auto_map")
    by_class = isinstance(classes, list) and CLASS in classes
    return by_class or (isinstance(code, Mapping) and any(MODULE in str(path) for path in code.values()))


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (stable-diffcoder)", raw, mask_token_id=MASK, eos_token_id=END)
    fields.only("attention_bias", False, optional=True)
    return ModelConfig(
        family="stable-diffcoder",
        block_length=fields.block("block_size", BLOCK),
        **_SWITCHES,
        **qwen.shape(fields, fields.head_dim()),
    )


STABLE_DIFFCODER = Family(
    name="stable-diffcoder",
    model_types=(),
    architectures=(CLASS,),
    names=qwen.NAMES,
    config=_config,
    recognises=_recognises,
    harmless=frozenset(),
    presets=shapes_of("stable-diffcoder", **_SWITCHES),
)
