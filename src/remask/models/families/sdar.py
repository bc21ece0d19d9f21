"""SDAR: block-causal diffusion on the dense Qwen3 architecture, 1.7B, 4B and 8B."""

from collections.abc import Mapping
from typing import Any

from remask.models.config import ModelConfig
from remask.models.families.family import Family, Names
from remask.models.families.fields import Fields
from remask.models.families.qwen import rope_theta

# The ids of the published vocabulary. An assistant turn ends with <|im_end|>, which config.json does not name.
MASK, END_OF_TURN = 151669, 151645


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (sdar)", raw)
    fields.only("hidden_act", "silu", optional=True)
    fields.only("attention_bias", False, optional=True)
    fields.only("use_sliding_window", False, optional=True)

    vocab = fields.integer("vocab_size")
    heads = fields.integer("num_attention_heads")
    mask = fields.token("mask_token_id", vocab)
    stops = fields.tokens("eos_token_id", vocab)
    if mask == MASK:
        stops += (END_OF_TURN,)
    return ModelConfig(
        family="sdar",
        layers=fields.integer("num_hidden_layers"),
        hidden=fields.integer("hidden_size"),
        heads=heads,
        kv_heads=fields.kv_heads("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", least=2),
        intermediate=fields.integer("intermediate_size"),
        vocab=vocab,
        max_length=fields.integer("max_position_embeddings"),
        rope_theta=rope_theta(fields, raw),
        norm_eps=fields.number("rms_norm_eps"),
        mask_id=mask,
        stop_ids=tuple(dict.fromkeys(stops)),
        tied=fields.flag("tie_word_embeddings", False),
        kind="block_causal",
        qk_norm="head",
        block_length=None if raw.get("block_size") is None else fields.integer("block_size"),
    )


SDAR = Family(
    name="sdar",
    model_types=("sdar",),
    architectures=("SDARForCausalLM",),
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
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
    ),
    config=_config,
)
