"""Dream: v0 7B base and instruct, and DiffuCoder, which has the same architecture."""

from collections.abc import Mapping
from typing import Any

from remask.models.config import ModelConfig
from remask.models.families.family import Family, Names
from remask.models.families.fields import Fields
from remask.models.families.qwen import rope_theta

# The ids of the published vocabulary. An assistant turn ends with <|im_end|>, which no key of config.json names.
MASK, END_OF_TURN = 151666, 151645


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (dream)", raw)
    fields.only("hidden_act", "silu", optional=True)
    # `sliding_window` itself may carry a size that is not in use.
    fields.only("use_sliding_window", False, optional=True)

    vocab = fields.integer("vocab_size")
    heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim("hidden_size", "num_attention_heads")
    mask = fields.token("mask_token_id", vocab)
    stops = fields.tokens("eos_token_id", vocab)
    if mask == MASK:
        stops += (END_OF_TURN,)
    return ModelConfig(
        family="dream",
        layers=fields.integer("num_hidden_layers"),
        hidden=fields.integer("hidden_size"),
        heads=heads,
        kv_heads=fields.kv_heads("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=vocab,
        max_length=fields.integer("max_position_embeddings"),
        rope_theta=rope_theta(fields, raw),
        norm_eps=fields.number("rms_norm_eps"),
        mask_id=mask,
        stop_ids=tuple(dict.fromkeys(stops)),
        qkv_bias=True,
        tied=fields.flag("tie_word_embeddings", False),
        shift=1,
    )


DREAM = Family(
    name="dream",
    model_types=("Dream",),
    architectures=("DreamModel",),
    names=Names(
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
    ),
    config=_config,
)
