"""iLLaDA: masked diffusion on Llama's architecture, 8B base and instruct, which decodes on a growing canvas.

This file follows public descriptions of the model and of its files. Neither was compared with a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import Fields
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

MASK, END = 5, 2  # of the published vocabulary; no published file names the mask
SAMPLING = SamplingDefaults(growing_canvas=True)


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    named = {key: value for key, value in raw.items() if value is not None}
    raw = {"mask_token_id": MASK, "eos_token_id": END, **named}
    fields = Fields("config.json (illada)", raw)
    for key in ("attention_bias", "mlp_bias"):
        fields.only(key, False, optional=True)
    head_dim = fields.head_dim("hidden_size", "num_attention_heads")
    fields.only("head_dim", head_dim, optional=True)
    return ModelConfig(family="illada", head_dim=head_dim, sampling=SAMPLING, **qwen.shape(fields, raw))


_ILLADA_8B = ModelConfig(
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

_ILLADA_TINY = replace(
    _ILLADA_8B,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=160,
    vocab=256,
    max_length=512,
)

ILLADA = Family(
    name="illada",
    model_types=("illada",),
    architectures=("ILLaDAForCausalLM",),
    names=qwen.NAMES,
    config=_config,
    presets={"illada-8b": _ILLADA_8B, "illada-tiny": _ILLADA_TINY},
)
