"""GIDD: uniform, masked and hybrid diffusion, gidd-unif-3b, gidd-unif-10b and gidd-mask-3b."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.denoising.noise import Noise
from remask.families import qwen
from remask.families.family import Factors, Family
from remask.families.fields import LAYERS, Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig

# The ids of the published tokenizer, which `null` stands for.
MASK, END = 3, 1


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`, in which `attention_bias` switches the sink on."""
    fields = Fields("config.json (gidd)", raw, mask_token_id=MASK, eos_token_id=END)
    fields.refuse_rope_scaling()
    fields.only("num_key_value_heads", fields.integer("num_attention_heads"), optional=True)
    shape = fields.shape(fields.head_dim())
    return ModelConfig(
        family="gidd",
        qk_norm="whole" if fields.flag("use_qk_norm") else None,
        sink="learned" if fields.flag("attention_bias") else None,
        score_cap=fields.number("attn_soft_cap") if raw.get("attn_soft_cap") else None,
        mlp_bias=fields.flag("mlp_bias"),
        # No published configuration has this key: their models were all trained under the structured mask.
        structured_attention=fields.flag("structured_attention", True),
        noise=Noise(
            shift=fields.real("noise_type"),
            min_log_snr=fields.real("min_log_snr"),
            max_log_snr=fields.real("max_log_snr"),
            vocab=shape["vocab"],
            mask_id=shape["mask_id"],
        ),
        **_SWITCHES,
        **shape,
    )


def _factors(raw: Mapping[str, Any]) -> Factors:
    fields = Fields("config.json (gidd)", raw)
    residual = fields.number("resid_scale") / fields.integer("num_hidden_layers", most=LAYERS)
    # A tied head is the embedding without a scale, as in the original.
    head = 1.0 if fields.flag("tie_word_embeddings", False) else fields.number("head_scaling")
    return Factors(linear=fields.scaling("weight_scaling"), residual=residual, head=head, gain=1.0)


_SWITCHES: Mapping[str, Any] = {"kind": "uniform", "mlp": "relu2"}
_NOISE = Noise(shift=1000.0, min_log_snr=-9.0, max_log_snr=9.0, vocab=131072, mask_id=MASK)

GIDD = Family(
    name="gidd",
    model_types=("gidd",),
    architectures=("GiddForDiffusionLM",),
    names=replace(
        qwen.HEAD_NORM_NAMES,
        attn_norm="attn_layernorm",
        ffn_norm="mlp_layernorm",
        gate=None,
        sink_k="self_attn.k_bias",
        sink_v="self_attn.v_bias",
    ),
    config=_config,
    factors=_factors,
    harmless=frozenset({"attn_performer", "head_scaling"}),
    presets=shapes_of(
        "gidd",
        {
            "gidd-mask-3b": {"noise": replace(_NOISE, shift=-1000.0)},
            "gidd-100m": {"noise": replace(_NOISE, vocab=8192)},
            "gidd-tiny": {"noise": replace(_NOISE, vocab=256)},
        },
        qk_norm="whole",
        sink="learned",
        score_cap=30.0,
        mlp_bias=True,
        noise=_NOISE,
        **_SWITCHES,
    ),
)
