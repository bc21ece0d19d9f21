"""`plain-llama`: a masked diffusion model with the tensor names of Llama."""

from collections.abc import Mapping
from typing import Any

from remask.families.family import Family, TensorNames
from remask.families.fields import Fields
from remask.model.config import ModelConfig

NAME = "plain-llama"


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape that `config.json` describes. Raises `CheckpointError` on keys that cannot be used."""
    fields = Fields(f"config.json ({NAME})", raw)
    fields.only("hidden_act", "silu", optional=True)
    fields.all_attended()
    vocab, heads = fields.integer("vocab_size"), fields.integer("num_attention_heads")
    head_dim = fields.head_dim("hidden_size", "num_attention_heads")
    return ModelConfig(
        family=NAME,
        layers=fields.integer("num_hidden_layers"),
        hidden=fields.integer("hidden_size"),
        heads=heads,
        kv_heads=fields.kv_heads("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=vocab,
        norm_eps=fields.number("rms_norm_eps"),
        mask_id=fields.token("mask_token_id", vocab),
        stop_ids=fields.tokens("eos_token_id", vocab),
        tied=fields.flag("tie_word_embeddings", False),
        **fields.rope(head_dim),
    )


TINY = ModelConfig(
    family=NAME,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=160,
    vocab=256,
    max_length=512,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    mask_id=255,
    stop_ids=(250,),
)

PLAIN_LLAMA = Family(
    name=NAME,
    model_types=("plain_llama",),
    architectures=("PlainLlamaForMaskedDiffusion",),
    names=TensorNames(
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
    config=read_config,
    presets={"plain-llama-tiny": TINY},
)
