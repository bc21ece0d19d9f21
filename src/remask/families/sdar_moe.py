"""SDAR-MoE: block-causal diffusion on the Qwen3-MoE architecture, 30B-A3B."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.checks.values import is_whole
from remask.families import qwen
from remask.families.family import Family, MixtureNames
from remask.families.fields import BLOCK, EXPERTS, LAYERS, Fields
from remask.families.sdar import MASK
from remask.model.config import Mixture, ModelConfig, Router


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (sdar-moe)", raw)
    fields.only("attention_bias", False, optional=True)
    experts, dense = fields.integer("num_experts", most=EXPERTS), _dense_layers(fields, raw)
    return ModelConfig(
        family="sdar-moe",
        head_dim=fields.integer("head_dim", least=2),
        kind="block_causal",
        qk_norm="head",
        block_length=None if raw.get("block_size") is None else fields.integer("block_size", most=BLOCK),
        mixture=Mixture(
            experts=experts,
            active=fields.integer("num_experts_per_tok", most=experts),
            intermediate=fields.integer("moe_intermediate_size"),
            dense_layers=dense,
            router=Router(normalise=fields.flag("norm_topk_prob")),
        ),
        **qwen.shape(fields, raw, MASK, dense=bool(dense)),
    )


def _dense_layers(fields: Fields, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers in `mlp_only_layers`, and those that `decoder_sparse_step` passes over."""
    layers, step = fields.integer("num_hidden_layers", most=LAYERS), fields.integer("decoder_sparse_step", 1)
    named = [] if raw.get("mlp_only_layers") is None else raw["mlp_only_layers"]
    if not isinstance(named, list) or not all(is_whole(layer, 0, layers - 1) for layer in named):
        raise fields.unfit("mlp_only_layers", f"a list of layers from 0 to {layers - 1}")
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


_SDAR_30B = ModelConfig(
    family="sdar-moe",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=0,
    vocab=151936,
    max_length=32768,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    mask_id=MASK,
    stop_ids=(151643, qwen.END_OF_TURN),
    kind="block_causal",
    qk_norm="head",
    block_length=4,
    mixture=Mixture(experts=128, active=8, intermediate=768, router=Router(normalise=True)),
)

_SDAR_MOE_TINY = replace(
    _SDAR_30B,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=256,
    max_length=512,
    mask_id=255,
    stop_ids=(250,),
    mixture=Mixture(experts=8, active=2, intermediate=48, router=Router(normalise=True)),
)

SDAR_MOE = Family(
    name="sdar-moe",
    model_types=("sdar_moe",),
    architectures=("SDARMoeForCausalLM",),
    names=replace(qwen.HEAD_NORM_NAMES, mixture=MixtureNames()),
    config=_config,
    presets={
        "sdar-30b-a3b": _SDAR_30B,
        "sdar-moe-tiny": _SDAR_MOE_TINY,
    },
)
