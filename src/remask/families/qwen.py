"""Names and fields that families on the architecture of Llama and Qwen have in common."""

from dataclasses import replace
from typing import Any

from remask.families.family import TensorNames
from remask.families.fields import Fields

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
"""`NAMES` with norms of the heads of Q and K, as in Qwen3."""


def shape(fields: Fields, head_dim: int, published_mask: int | None = None, **settings: Any) -> dict[str, Any]:
    """`Fields.shape` with `settings`, for configurations with the switches of Llama and Qwen.

    If the mask token is `published_mask`, that of Qwen's published vocabulary, the end of a turn also stops a response.
    """
    fields.only("hidden_act", "silu", optional=True)
    for key in ("mlp_bias", "use_mrope"):
        fields.only(key, False, optional=True)
    values = fields.shape(head_dim, **settings)
    if values["mask_id"] == published_mask:
        values["stop_ids"] = tuple(dict.fromkeys((*values["stop_ids"], END_OF_TURN)))
    return values
