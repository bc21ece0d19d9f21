"""SDAR: block-causal diffusion on the Qwen3 architecture, 1.7B, 4B and 8B, and 30B-A3B with a mixture of experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.checks.values import is_whole
from remask.families import qwen
from remask.families.family import Family, MixtureNames
from remask.families.fields import LAYERS, Fields
from remask.families.shapes import shapes_of
from remask.model.config import Mixture, ModelConfig, Router

MASK = 151669  # of the published vocabulary
_SWITCHES: Mapping[str, Any] = {"kind": "block_causal", "qk_norm": "head"}


def _dense(raw: Mapping[str, Any]) -> ModelConfig:
    return _config("sdar", Fields("config.json (sdar)", raw), None)


def _mixed(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json` with a mixture of experts, whose router is that of Qwen3-MoE."""
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
        block_length=fields.block("block_size"),
        mixture=mixture,
        **_SWITCHES,
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


SDAR = Family(
    name="sdar",
    model_types=("sdar",),
    architectures=("SDARForCausalLM",),
    names=qwen.HEAD_NORM_NAMES,
    config=_dense,
    harmless=frozenset({"fuse_cross_entropy"}),
    presets=shapes_of("sdar", **_SWITCHES),
)

SDAR_MOE = Family(
    name="sdar-moe",
    model_types=("sdar_moe",),
    architectures=("SDARMoeForCausalLM",),
    names=replace(qwen.HEAD_NORM_NAMES, mixture=MixtureNames()),
    config=_mixed,
    harmless=frozenset({"fuse_cross_entropy", "intermediate_size"}),
    presets=shapes_of(
        "sdar-moe",
        {
            "sdar-30b-a3b": {
                "mixture": Mixture(experts=128, active=8, intermediate=768, router=Router(normalise=True))
            },
            "sdar-moe-tiny": {"mixture": Mixture(experts=8, active=2, intermediate=48, router=Router(normalise=True))},
        },
        **_SWITCHES,
    ),
)
