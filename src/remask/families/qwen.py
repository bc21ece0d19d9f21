"""The parts that the configurations of families on the architecture of Llama and Qwen have in common."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families.family import TensorNames
from remask.families.fields import LAYERS, VOCAB, Fields

# Of the published vocabulary: an assistant turn ends with <|im_end|>, which no key of config.json names.
END_OF_TURN = 151645

NAMES = TensorNames(
    embed="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attn_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    out="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

HEAD_NORM_NAMES = replace(NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
"""The same with norms of the heads of Q and K, as in Qwen3."""

SHAPE_7B: Mapping[str, Any] = {
    "layers": 28,
    "hidden": 3584,
    "heads": 28,
    "kv_heads": 4,
    "head_dim": 128,
    "intermediate": 18944,
    "vocab": 152064,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-6,
    "stop_ids": (151643, END_OF_TURN),
    "qkv_bias": True,
    "shift": 1,
}
"""Fields of `ModelConfig` that diffusion models made of Qwen2.5-7B have in common."""


def shape(
    fields: Fields, raw: Mapping[str, Any], published_mask: int | None = None, *, dense: bool = True
) -> dict[str, Any]:
    """The fields of `ModelConfig` that all these configurations hold under the same keys. `head_dim` is not among them.

    With `published_mask`, the mask token of Qwen's published vocabulary, the end of a turn also stops a response.
    Without a `dense` layer the width of one is not read.
    """
    fields.only("hidden_act", "silu", optional=True)
    # `sliding_window` itself may carry a size that is not in use.
    fields.only("use_sliding_window", False, optional=True)
    vocab, heads = fields.integer("vocab_size", most=VOCAB), fields.integer("num_attention_heads")
    mask = fields.token("mask_token_id", vocab)
    stops = fields.tokens("eos_token_id", vocab)
    if mask == published_mask:
        stops += (END_OF_TURN,)
    return {
        "layers": fields.integer("num_hidden_layers", most=LAYERS),
        "hidden": fields.integer("hidden_size"),
        "heads": heads,
        "kv_heads": fields.kv_heads("num_key_value_heads", heads),
        "intermediate": fields.integer("intermediate_size") if dense else 0,
        "vocab": vocab,
        "max_length": fields.integer("max_position_embeddings"),
        "rope_theta": rope_theta(fields, raw),
        "norm_eps": fields.number("rms_norm_eps"),
        "mask_id": mask,
        "stop_ids": tuple(dict.fromkeys(stops)),
        "tied": fields.flag("tie_word_embeddings", False),
    }


def rope_theta(fields: Fields, raw: Mapping[str, Any]) -> float:
    """The base of RoPE: `rope_theta`, or the key of this name in `rope_parameters`, where newer files hold it."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(key)
        if scaling is not None and not (
            isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) == "default"
        ):
            raise fields.unfit(key, 'null, or an object of "rope_type": "default" (no scaling of positions)')
    if raw.get("rope_theta") is None and raw.get("rope_parameters") is not None:
        return Fields("config.json, 'rope_parameters'", raw["rope_parameters"]).number("rope_theta")
    return fields.number("rope_theta")
