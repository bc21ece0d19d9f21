"""Dream: v0 7B base and instruct, and DiffuCoder, which has the same architecture."""

from collections.abc import Mapping
from typing import Any

from remask.families import qwen
from remask.families.family import Family, tiny
from remask.families.fields import Fields
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

MASK = 151666  # of the published vocabulary
SAMPLING = SamplingDefaults(remasking="entropy", time_schedule=True)


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (dream)", raw)
    head_dim = fields.head_dim("hidden_size", "num_attention_heads")
    shape = qwen.shape(fields, head_dim, MASK)
    return ModelConfig(family="dream", qkv_bias=True, shift=1, sampling=SAMPLING, **shape)


_DREAM_7B = ModelConfig(family="dream", max_length=131072, mask_id=MASK, sampling=SAMPLING, **qwen.SHAPE_7B)

DREAM = Family(
    name="dream",
    model_types=("Dream",),
    architectures=("DreamModel",),
    names=qwen.NAMES,
    config=_config,
    harmless=frozenset(),
    presets={"dream-7b": _DREAM_7B, "diffucoder-7b": _DREAM_7B, "dream-tiny": tiny(_DREAM_7B)},
)
