"""ModernBERT (BERT-Chat of dLLM): an encoder that was trained to denoise. Two layers of three are sliding."""

from collections.abc import Mapping
from typing import Any

from remask.families.a2d import SAMPLING
from remask.families.family import Family, TensorNames
from remask.families.fields import FULL, LAYERS, SLIDING, VOCAB, Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig, Sliding

# Of the published vocabulary: no key of config.json names the mask.
WORDS, MASK = 50368, 50284


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`. A model of the published vocabulary has the published mask by default."""
    published = {"mask_token_id": MASK} if raw.get("vocab_size") == WORDS else {}
    fields = Fields("config.json (modernbert)", raw, **published)
    for key in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
        fields.only(key, False, optional=True)
    for key in ("hidden_activation", "classifier_activation"):
        fields.only(key, "gelu", optional=True)
    fields.only("rope_scaling", None, optional=True)
    heads, vocab = fields.integer("num_attention_heads"), fields.integer("vocab_size", most=VOCAB)
    fields.only("num_key_value_heads", heads, optional=True)
    sliding = _sliding_layers(fields)
    theta = _theta(fields, FULL, "global")
    sliding_theta = _theta(fields, SLIDING, "local")
    return ModelConfig(
        family="modernbert",
        layers=fields.integer("num_hidden_layers", most=LAYERS),
        hidden=fields.integer("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=fields.head_dim(),
        intermediate=fields.integer("intermediate_size"),
        vocab=vocab,
        max_length=fields.integer("max_position_embeddings"),
        rope_theta=theta,
        norm_eps=fields.number("norm_eps"),
        mask_id=fields.mask(vocab),
        stop_ids=tuple(dict.fromkeys(fields.tokens("eos_token_id", vocab))),
        tied=fields.flag("tie_word_embeddings", True),
        sliding=Sliding(sliding, _reach(fields), sliding_theta) if sliding else None,
        head_bias=fields.flag("decoder_bias", True),
        **_SWITCHES,
    )


_SWITCHES: Mapping[str, Any] = {
    "norm": "layer",
    "embed_norm": True,
    "head_dense": True,
    "mlp": "geglu",
    "sampling": SAMPLING,
}


def _sliding_layers(fields: Fields) -> tuple[int, ...]:
    """The sliding layers: those in `layer_types` of transformers 5, or all but every n-th layer."""
    layers, kinds = fields.integer("num_hidden_layers", most=LAYERS), fields.get("layer_types")
    if kinds is None or fields.get("global_attn_every_n_layers") is not None:
        every = fields.integer("global_attn_every_n_layers")
        pattern = [SLIDING if layer % every else FULL for layer in range(layers)]
        if kinds not in (None, pattern):
            raise fields.unfit("layer_types", f"what 'global_attn_every_n_layers' says, {every}")
        kinds = pattern
    return fields.sliding_layers(kinds, layers)


def _reach(fields: Fields) -> int:
    """The positions to each side that a row of a sliding layer sees: `sliding_window`, or half of `local_attention`."""
    half = fields.get("sliding_window")
    if half is None:
        return fields.integer("local_attention", least=2) // 2
    fields.only("local_attention", 2 * fields.integer("sliding_window"), optional=True)
    return int(half)


def _theta(fields: Fields, kind: str, name: str) -> float:
    """The base of RoPE in layers of a `kind`: in `rope_parameters` of transformers 5, or the key `NAME_rope_theta`."""
    parameters = fields.get("rope_parameters")
    if parameters is None:
        return fields.number(f"{name}_rope_theta")
    inner = parameters.get(kind) if isinstance(parameters, Mapping) else None
    if not isinstance(inner, Mapping) or set(inner) - {"rope_type", "rope_theta"}:
        raise fields.unfit("rope_parameters", f'an object of objects of "rope_type" and "rope_theta", with {kind!r}')
    rope = Fields(f"config.json (modernbert), 'rope_parameters', {kind!r}", inner)
    rope.only("rope_type", "default", optional=True)
    fields.only(f"{name}_rope_theta", rope.number("rope_theta"), optional=True)
    return rope.number("rope_theta")


def _sliding(layers: int, reach: int = 64) -> Sliding:
    return Sliding(tuple(layer for layer in range(layers) if layer % 3), reach, 10_000.0)


# BERT-Chat's: plain text, no special tokens.
_CHAT = (
    "{% for message in messages %}{% if message.role == 'system' %}[SYS]\n{{ message.content }}\n[/SYS]\n\n"
    "{% elif message.role == 'assistant' %}[Answer]\n{{ message.content }}\n[/Answer]\n\n"
    "{% else %}[Question]\n{{ message.content }}\n[/Question]\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[Answer]\n{% endif %}"
)

MODERNBERT = Family(
    name="modernbert",
    model_types=("modernbert",),
    architectures=("ModernBertForMaskedLM",),
    names=TensorNames(
        embed="model.embeddings.tok_embeddings",
        embed_norm="model.embeddings.norm",
        norm="model.final_norm",
        head_dense="head.dense",
        head_norm="head.norm",
        head="decoder",
        layer="model.layers.{}.",
        attn_norm="attn_norm",
        qkv="attn.Wqkv",
        out="attn.Wo",
        ffn_norm="mlp_norm",
        gate_up="mlp.Wi",
        down="mlp.Wo",
    ),
    config=_config,
    chat_template=_CHAT,
    stop=("[/Answer]",),
    harmless=frozenset(
        (
            *("local_attention", "classifier_pooling", "classifier_activation", "deterministic_flash_attn"),
            *("repad_logits_with_grad", "initializer_cutoff_factor", "sparse_pred_ignore_index", "reference_compile"),
        )
    ),
    presets=shapes_of(
        "modernbert",
        {
            "modernbert-base-chat": {"sliding": _sliding(22)},
            "modernbert-large-chat": {"sliding": _sliding(28)},
            "modernbert-tiny": {"sliding": _sliding(4, 6)},
        },
        head_bias=True,
        **_SWITCHES,
    ),
)
