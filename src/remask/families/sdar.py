"""SDAR: block-causal diffusion on the dense Qwen3 architecture, 1.7B, 4B and 8B."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import BLOCK, Fields
from remask.model.config import ModelConfig

MASK = 151669  # of the published vocabulary


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (sdar)", raw)
    fields.only("attention_bias", False, optional=True)
    return ModelConfig(
        family="sdar",
        head_dim=fields.integer("head_dim", least=2),
        kind="block_causal",
        qk_norm="head",
        block_length=None if raw.get("block_size") is None else fields.integer("block_size", most=BLOCK),
        **qwen.shape(fields, raw, MASK),
    )


_SDAR_4B = ModelConfig(
    family="sdar",
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=9728,
    vocab=151936,
    max_length=32768,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    mask_id=MASK,
    stop_ids=(151643, qwen.END_OF_TURN),
    kind="block_causal",
    qk_norm="head",
    block_length=4,
)

_SDAR_8B = replace(_SDAR_4B, hidden=4096, intermediate=12288)

# As its base, Qwen3-1.7B, whose embedding is tied; the checkpoint's own config.json decides for a real one.
_SDAR_1_7B = replace(_SDAR_4B, layers=28, hidden=2048, heads=16, intermediate=6144, tied=True)

_SDAR_100M = replace(
    _SDAR_4B,
    layers=16,
    hidden=768,
    heads=12,
    kv_heads=6,
    head_dim=64,
    intermediate=2048,
    vocab=32000,
    max_length=4096,
    mask_id=31999,
    stop_ids=(31998,),
    tied=True,
)

_SDAR_TINY = replace(
    _SDAR_100M,
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

SDAR = Family(
    name="sdar",
    model_types=("sdar",),
    architectures=("SDARForCausalLM",),
    names=qwen.HEAD_NORM_NAMES,
    config=_config,
    presets={
        "sdar-1.7b": _SDAR_1_7B,
        "sdar-4b": _SDAR_4B,
        "sdar-8b": _SDAR_8B,
        "sdar-100m": _SDAR_100M,
        "sdar-tiny": _SDAR_TINY,
    },
)
