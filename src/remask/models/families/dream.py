"""Dream: v0 7B base and instruct, and DiffuCoder, which has the same architecture."""

from collections.abc import Mapping
from typing import Any

from remask.models.config import ModelConfig
from remask.models.families import qwen
from remask.models.families.family import Family
from remask.models.families.fields import Fields

MASK = 151666  # of the published vocabulary


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (dream)", raw)
    return ModelConfig(
        family="dream",
        head_dim=fields.head_dim("hidden_size", "num_attention_heads"),
        qkv_bias=True,
        shift=1,
        **qwen.shape(fields, raw, MASK),
    )


DREAM = Family(
    name="dream",
    model_types=("Dream",),
    architectures=("DreamModel",),
    names=qwen.NAMES,
    config=_config,
)
