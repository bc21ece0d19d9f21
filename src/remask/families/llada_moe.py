"""LLaDA-MoE: masked diffusion with a mixture of experts, 7B-A1B base and instruct."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families import qwen
from remask.families.family import Family, MixtureNames
from remask.families.fields import LAYERS, Fields
from remask.families.shapes import shapes_of
from remask.model.config import Mixture, ModelConfig

# The ids of the vocabulary of LLaDA-MoE and LLaDA2. The published config.json names no mask.
MASK, END = 156895, 156892

ARCHITECTURES = ("LLaDAMoEModelLM", "LLaDAMoEModel")

# Keys of the configuration that the authors' router does not read.
_UNREAD = (
    *("router_num_group", "router_topk_group", "norm_topk_prob", "routed_scaling_factor"),
    "moe_router_score_function",
)


def _recognises(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json has "llada", the dense family's name, but an architecture or experts of this one."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    if not isinstance(model_type, str) or model_type.casefold() != "llada":
        return False
    has_class = isinstance(architectures, list) and any(name in ARCHITECTURES for name in architectures)
    return has_class or raw.get("num_experts") is not None


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`. Without dense layers it needs no width of their MLP."""
    fields = Fields("config.json (llada-moe)", raw, mask_token_id=MASK, rms_norm_eps=1e-5)
    fields.only("hidden_act", "silu", optional=True)
    for key in ("attention_bias", "mlp_bias", "moe_router_enable_expert_bias"):
        fields.only(key, False, optional=True)
    fields.only("clip_qkv", None, optional=True)
    experts, dense = fields.experts(), _dense_layers(fields)
    return ModelConfig(
        family="llada-moe",
        qk_norm="head" if fields.flag("qk_layernorm", False) else None,
        rope_float32=fields.flag("rope_full_precision", False),
        mixture=Mixture(
            experts=experts,
            active=fields.integer("num_experts_per_tok", most=experts),
            intermediate=fields.integer("expert_intermediate_size"),
            shared=fields.integer("shared_expert_intermediate_size", 0),
            dense_layers=dense,
        ),
        **fields.shape(fields.head_dim(), width_key="dense_intermediate_size" if dense else None, share=1.0),
    )


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Layers whose entry in `moe_layer_freq` is 0; the list has one entry a layer."""
    layers = fields.integer("num_hidden_layers", most=LAYERS)
    frequency = fields.get("moe_layer_freq")
    if not isinstance(frequency, list) or len(frequency) != layers or any(entry not in (0, 1) for entry in frequency):
        raise fields.unfit("moe_layer_freq", f"a list of {layers} numbers, one a layer: 0 is dense, 1 has experts")
    return tuple(layer for layer, entry in enumerate(frequency) if not entry)


LLADA_MOE = Family(
    name="llada-moe",
    model_types=("lladamoe", "llada_moe"),
    architectures=ARCHITECTURES,
    names=replace(qwen.HEAD_NORM_NAMES, mixture=MixtureNames(shared="shared_expert.")),
    config=_config,
    recognises=_recognises,
    harmless=frozenset({"intermediate_size", "dense_intermediate_size", *_UNREAD}),
    presets=shapes_of(
        "llada-moe",
        {
            "llada-moe-7b-a1b": {"mixture": Mixture(experts=64, active=8, intermediate=1024)},
            "llada-moe-tiny": {"mixture": Mixture(experts=8, active=2, intermediate=48, dense_layers=(0,))},
        },
        qk_norm="head",
    ),
)
