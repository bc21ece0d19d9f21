"""LLaDA: 8B base and instruct, 1.5."""

from collections.abc import Mapping
from typing import Any

from remask.families.family import Family, TensorNames
from remask.families.fields import LAYERS, VOCAB, Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig

# The ids of the published vocabulary. An assistant turn ends with <|eot_id|>, which no key of config.json names.
MASK, END_OF_TURN = 126336, 126348

# The authors' defaults for these keys differ from what the published checkpoints use, so the keys must be there.
SWITCHES: Mapping[str, Any] = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "include_bias": False,
}
_OFF = ("include_qkv_bias", "bias_for_layer_norm", "alibi", "attention_layer_norm", "input_emb_norm", "scale_logits")


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`. With the published mask token, the published end of a turn stops a response too."""
    fields = Fields("config.json (llada)", raw)
    for key, value in SWITCHES.items():
        fields.only(key, value)
    for key in _OFF:
        fields.only(key, False, optional=True)
    fields.only("layer_norm_with_affine", True, optional=True)
    fields.only("block_group_size", 1, optional=True)
    # `n_kv_heads`, which the published checkpoints always give, decides on grouped and single key heads.
    if raw.get("multi_query_attention"):
        fields.only("n_kv_heads", 1)
    fields.only("clip_qkv", None, optional=True)
    fields.all_attended()

    heads, head_dim = fields.integer("n_heads"), fields.head_dim("d_model", "n_heads")
    fields.refuse_rope_scaling()
    # Rows of the embedding. There may be more of them than words in the vocabulary.
    words = fields.integer("vocab_size", most=VOCAB)
    vocab = fields.integer("embedding_size", words, most=VOCAB)
    if vocab < words:
        raise fields.unfit("embedding_size", f"null or at least 'vocab_size' = {words}")
    mask = fields.mask(vocab)
    stops = fields.tokens("eos_token_id", vocab)
    if mask == MASK and vocab > END_OF_TURN:
        stops += (END_OF_TURN,)
    return ModelConfig(
        family="llada",
        layers=fields.integer("n_layers", most=LAYERS),
        hidden=fields.integer("d_model"),
        heads=heads,
        kv_heads=fields.kv_heads("n_kv_heads", heads),
        head_dim=head_dim,
        intermediate=fields.integer("mlp_hidden_size"),
        vocab=vocab,
        norm_eps=fields.number("rms_norm_eps"),
        mask_id=mask,
        stop_ids=tuple(dict.fromkeys(stops)),
        tied=fields.flag("weight_tying"),
        rope_float32=fields.flag("rope_full_precision", True),
        **fields.rope(head_dim, positions_key="max_sequence_length"),
    )


LLADA = Family(
    name="llada",
    model_types=("llada",),
    architectures=("LLaDAModelLM",),
    names=TensorNames(
        embed="model.transformer.wte",
        norm="model.transformer.ln_f",
        head="model.transformer.ff_out",
        layer="model.transformer.blocks.{}.",
        attn_norm="attn_norm",
        q="q_proj",
        k="k_proj",
        v="v_proj",
        out="attn_out",
        ffn_norm="ff_norm",
        gate="ff_proj",
        up="up_proj",
        down="ff_out",
    ),
    config=_config,
    harmless=frozenset(
        # The width is d_model; tools for adapters look for it under its usual name.
        {"alibi_bias_max", "attention_layer_norm_with_affine", "hidden_size", "mlp_ratio", "precision"}
    ),
    presets=shapes_of("llada", rope_float32=True),
)
