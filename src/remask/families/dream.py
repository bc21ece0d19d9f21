"""Dream: v0 7B base and instruct, and DiffuCoder, which has the same architecture."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import Fields
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

MASK = 151666  # of the published vocabulary
SAMPLING = SamplingDefaults(remasking="entropy", time_schedule=True)


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (dream)", raw)
    return ModelConfig(
        family="dream",
        head_dim=fields.head_dim("hidden_size", "num_attention_heads"),
        qkv_bias=True,
        shift=1,
        sampling=SAMPLING,
        **qwen.shape(fields, raw, MASK),
    )


_DREAM_7B = ModelConfig(family="dream", max_length=131072, mask_id=MASK, sampling=SAMPLING, **qwen.SHAPE_7B)

_DREAM_TINY = replace(
    _DREAM_7B,
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
)

DREAM = Family(
    name="dream",
    model_types=("Dream",),
    architectures=("DreamModel",),
    names=qwen.NAMES,
    config=_config,
    presets={
        "dream-7b": _DREAM_7B,
        "diffucoder-7b": _DREAM_7B,
        "dream-tiny": _DREAM_TINY,
    },
)
