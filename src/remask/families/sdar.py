"""SDAR: block-causal diffusion on the Qwen3 architecture, 1.7B, 4B and 8B, and 30B-A3B with a mixture of experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.checks.values import is_whole
from remask.families import qwen
from remask.families.family import Family, MixtureNames, tiny
from remask.families.fields import LAYERS, Fields
from remask.model.config import Mixture, ModelConfig, Router

MASK = 151669  # of the published vocabulary


def _dense(raw: Mapping[str, Any]) -> ModelConfig:
    return _config("sdar", Fields("config.json (sdar)", raw), None)


def _mixed(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (sdar-moe)", raw)
    experts = fields.experts()
    mixture = Mixture(
        experts=experts,
        active=fields.integer("num_experts_per_tok", most=experts),
        intermediate=fields.integer("moe_intermediate_size"),
        dense_layers=_dense_layers(fields),
        router=Router(normalise=fields.flag("norm_topk_prob")),
    )
    return _config("sdar-moe", fields, mixture)


def _config(family: str, fields: Fields, mixture: Mixture | None) -> ModelConfig:
    fields.only("attention_bias", False, optional=True)
    width = "intermediate_size" if mixture is None or mixture.dense_layers else None
    return ModelConfig(
        family=family,
        kind="block_causal",
        qk_norm="head",
        block_length=fields.block("block_size"),
        mixture=mixture,
        **qwen.shape(fields, fields.integer("head_dim", least=2), MASK, width_key=width),
    )


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """The layers in `mlp_only_layers`, and those that `decoder_sparse_step` leaves dense."""
    layers = fields.integer("num_hidden_layers", most=LAYERS)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(is_whole(layer, 0, layers - 1) for layer in dense):
        raise fields.unfit("mlp_only_layers", f"a list of layers from 0 to {layers - 1}")
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)


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

_SDAR_30B = replace(
    _SDAR_4B,
    family="sdar-moe",
    layers=48,
    hidden=2048,
    kv_heads=4,
    intermediate=0,
    mixture=Mixture(experts=128, active=8, intermediate=768, router=Router(normalise=True)),
)

_SMALL_EXPERTS = Mixture(experts=8, active=2, intermediate=48, router=Router(normalise=True))

SDAR = Family(
    name="sdar",
    model_types=("sdar",),
    architectures=("SDARForCausalLM",),
    names=qwen.HEAD_NORM_NAMES,
    config=_dense,
    harmless=frozenset({"fuse_cross_entropy"}),
    presets={
        # As its base, Qwen3-1.7B, whose embedding is tied; the checkpoint's own config.json decides for a real one.
        "sdar-1.7b": replace(_SDAR_4B, layers=28, hidden=2048, heads=16, intermediate=6144, tied=True),
        "sdar-4b": _SDAR_4B,
        "sdar-8b": replace(_SDAR_4B, hidden=4096, intermediate=12288),
        "sdar-100m": replace(
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
        ),
        "sdar-tiny": tiny(_SDAR_4B, tied=True),
    },
)

SDAR_MOE = Family(
    name="sdar-moe",
    model_types=("sdar_moe",),
    architectures=("SDARMoeForCausalLM",),
    names=replace(qwen.HEAD_NORM_NAMES, mixture=MixtureNames()),
    config=_mixed,
    harmless=frozenset({"fuse_cross_entropy", "intermediate_size"}),
    presets={"sdar-30b-a3b": _SDAR_30B, "sdar-moe-tiny": tiny(_SDAR_30B, intermediate=0, mixture=_SMALL_EXPERTS)},
)
