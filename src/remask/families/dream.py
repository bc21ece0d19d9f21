"""Dream: v0 7B base and instruct, and DiffuCoder, which has the same architecture."""

from collections.abc import Mapping
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

MASK = 151666  # of the published vocabulary
_SWITCHES: Mapping[str, Any] = {
    "qkv_bias": True,
    "shift": 1,
    "sampling": SamplingDefaults(remasking="entropy", time_schedule=True),
}


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (dream)", raw)
    return ModelConfig(family="dream", **_SWITCHES, **qwen.shape(fields, fields.head_dim(), MASK))


DREAM = Family(
    name="dream",
    model_types=("Dream",),
    architectures=("DreamModel",),
    names=qwen.NAMES,
    config=_config,
    harmless=frozenset(),
    presets=shapes_of("dream", **_SWITCHES),
)
