"""iLLaDA: masked diffusion on Llama's architecture, 8B base and instruct, which decodes on a growing canvas.

This file follows public descriptions of the model and of its files. Neither was compared with a checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from remask.families import qwen
from remask.families.family import Family, tiny
from remask.families.fields import Fields
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

MASK, END = 5, 2  # of the published vocabulary; no published file names the mask
SAMPLING = SamplingDefaults(growing_canvas=True)


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (illada)", raw, mask_token_id=MASK, eos_token_id=END)
    fields.refuse_rope_scaling()
    fields.only("attention_bias", False, optional=True)
    head_dim = fields.head_dim("hidden_size", "num_attention_heads")
    return ModelConfig(family="illada", sampling=SAMPLING, **qwen.shape(fields, head_dim))


ILLADA_8B = ModelConfig(
    family="illada",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=155136,
    max_length=8192,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    mask_id=MASK,
    stop_ids=(END,),
    tied=True,
    sampling=SAMPLING,
)

ILLADA = Family(
    name="illada",
    model_types=("illada",),
    architectures=("ILLaDAForCausalLM",),
    names=qwen.NAMES,
    config=_config,
    harmless=frozenset(),
    presets={"illada-8b": ILLADA_8B, "illada-tiny": tiny(ILLADA_8B, mask_id=MASK, stop_ids=(END,))},
)
