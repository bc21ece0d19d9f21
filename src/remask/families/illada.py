"""iLLaDA: masked diffusion on Llama's architecture, 8B base and instruct, which decodes on a growing canvas.

This file follows public descriptions of the model and of its files. Neither was compared with a checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

MASK, END = 5, 2  # of the published vocabulary; no published file names the mask
SAMPLING = SamplingDefaults(growing_canvas=True)


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (illada)", raw, mask_token_id=MASK, eos_token_id=END)
    fields.refuse_rope_scaling()
    fields.only("attention_bias", False, optional=True)
    return ModelConfig(family="illada", sampling=SAMPLING, **qwen.shape(fields, fields.head_dim()))


ILLADA = Family(
    name="illada",
    model_types=("illada",),
    architectures=("ILLaDAForCausalLM",),
    names=qwen.NAMES,
    config=_config,
    harmless=frozenset(),
    presets=shapes_of("illada", sampling=SAMPLING),
)
