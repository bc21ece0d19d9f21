"""GIDD: uniform, masked and hybrid diffusion, gidd-unif-3b, gidd-unif-10b and gidd-mask-3b."""

from collections.abc import Mapping
from typing import Any

from remask.core.noise import Noise
from remask.models.config import ModelConfig
from remask.models.families.family import Factors, Family, Names
from remask.models.families.fields import Fields

# What `null` means for these keys: the ids of the published tokenizer.
MASK, END = 3, 1


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (gidd)", raw)
    vocab = fields.integer("vocab_size")
    heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim("hidden_size", "num_attention_heads")
    if raw.get("head_dim") is not None:
        fields.only("head_dim", head_dim)
    mask = fields.token("mask_token_id", vocab) if raw.get("mask_token_id") is not None else MASK
    return ModelConfig(
        family="gidd",
        layers=fields.integer("num_hidden_layers"),
        hidden=fields.integer("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=vocab,
        max_length=fields.integer("max_position_embeddings"),
        rope_theta=fields.number("rope_theta"),
        norm_eps=fields.number("rms_norm_eps"),
        mask_id=mask,
        stop_ids=fields.tokens("eos_token_id", vocab) or (END,),
        tied=fields.flag("tie_word_embeddings", False),
        kind="uniform",
        qk_norm="whole" if fields.flag("use_qk_norm") else None,
        sink=fields.flag("attention_bias"),
        score_cap=fields.number("attn_soft_cap") if raw.get("attn_soft_cap") else None,
        mlp="relu2",
        mlp_bias=fields.flag("mlp_bias"),
        noise=Noise(
            shift=fields.real("noise_type"),
            min_log_snr=fields.real("min_log_snr"),
            max_log_snr=fields.real("max_log_snr"),
            vocab=vocab,
            mask_id=mask,
        ),
    )


def _factors(raw: Mapping[str, Any]) -> Factors:
    fields = Fields("config.json (gidd)", raw)
    residual = fields.number("resid_scale") / fields.integer("num_hidden_layers")
    # A tied head is the embedding as it is: the original leaves its scale out.
    head = 1.0 if fields.flag("tie_word_embeddings", False) else fields.number("head_scaling")
    return Factors(linear=fields.scaling("weight_scaling"), residual=residual, head=head, gain=1.0)


GIDD = Family(
    name="gidd",
    model_types=("gidd",),
    architectures=("GiddForDiffusionLM",),
    names=Names(
        embed="model.embed_tokens",
        norm="model.norm",
        head="lm_head",
        layer="model.layers.{}.",
        attn_norm="attn_layernorm",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        out="self_attn.o_proj",
        ffn_norm="mlp_layernorm",
        up="mlp.up_proj",
        down="mlp.down_proj",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        sink_k="self_attn.k_bias",
        sink_v="self_attn.v_bias",
    ),
    config=_config,
    factors=_factors,
)
