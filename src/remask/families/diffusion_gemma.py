"""DiffusionGemma: Gemma 4 that denoises one canvas after the other by uniform diffusion. Text only.

Names of tensors and keys are those of transformers' implementation. No published checkpoint was read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.checks.values import is_whole
from remask.families import qwen
from remask.families.family import Factors, Family, MixtureNames
from remask.families.fields import FULL, LAYERS, NO_MASK, SIZE, SLIDING, VOCAB, Fields
from remask.families.shapes import shapes_of
from remask.model.config import Mixture, ModelConfig, RopeScaling, Router, Sliding

_SOURCE = "config.json (diffusion-gemma)"
_PATTERN = 6  # by default every sixth layer has full attention
_HEAD_DIM, _FULL_HEAD_DIM = 256, 512  # default widths of a head, in sliding layers and in those with full attention


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`. All sizes but `canvas_length` are those of its `text_config`."""
    outer = Fields(_SOURCE, raw)
    outer.only("tie_word_embeddings", True, optional=True)
    inner = outer.get("text_config")
    if not isinstance(inner, Mapping):
        raise outer.unfit("text_config", "an object with the keys of the text model")
    fields = Fields(f"{_SOURCE}, 'text_config'", inner)
    fields.only("attention_bias", False, optional=True)
    fields.only("attention_k_eq_v", True, optional=True)
    fields.only("hidden_activation", "gelu_pytorch_tanh", optional=True)
    fields.only("tie_word_embeddings", True, optional=True)
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise fields.unfit("use_bidirectional_attention", 'null or "vision", which leave text causal')
    layers, heads = fields.integer("num_hidden_layers", most=LAYERS), fields.integer("num_attention_heads")
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size", most=VOCAB)
    sliding = _sliding_layers(fields, layers)
    full_head_dim, full_kv_heads = _full_heads(fields, sliding, layers, heads)
    head_dim = fields.integer("head_dim", _HEAD_DIM, least=2)
    intermediate = fields.integer("intermediate_size")
    sliding_theta = _rope(fields, SLIDING, head_dim)[0] if sliding else 0.0
    theta, scaling = _rope(fields, FULL, full_head_dim)
    experts = fields.experts()
    return ModelConfig(
        family="diffusion-gemma",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=full_kv_heads,
        head_dim=full_head_dim,
        intermediate=intermediate,
        vocab=vocab,
        max_length=fields.integer("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("rms_norm_eps"),
        mask_id=NO_MASK,
        stop_ids=tuple(dict.fromkeys(fields.tokens("eos_token_id", vocab))),
        tied=True,
        sliding=_sliding(
            sliding,
            fields.integer("sliding_window", least=2) if sliding else 2,
            sliding_theta,
            fields.kv_heads("num_key_value_heads", heads),
            head_dim,
        ),
        embed_scale=hidden**0.5,
        logit_cap=fields.optional_number("final_logit_softcapping", 30.0),
        mixture=_mixture(
            experts,
            fields.integer("top_k_experts", most=experts),
            fields.integer("moe_intermediate_size"),
            intermediate,
        ),
        block_length=outer.block("canvas_length", 256),
        **_SWITCHES,
    )


_SWITCHES: Mapping[str, Any] = {
    "kind": "block_causal",
    "qk_norm": "head",
    "value_norm": True,
    "tied_values": True,
    "post_norms": True,
    "layer_scales": True,
    "mlp": "geglu_tanh",
    "self_conditioning": True,
}


def _sliding_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """The sliding layers. The last layer is never one, whatever the file says, as in transformers."""
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % _PATTERN else FULL for layer in range(layers)]
    return tuple(layer for layer in fields.sliding_layers(kinds, layers) if layer < layers - 1)


def _full_heads(fields: Fields, sliding: tuple[int, ...], layers: int, heads: int) -> tuple[int, int]:
    """Width and number of K/V heads in layers with full attention: under keys of their own, or in each layer's."""
    by_layer = fields.get("per_layer_config")
    if by_layer is None:
        head_dim = fields.integer("global_head_dim", _FULL_HEAD_DIM, least=2)
        kv_heads = fields.integer("num_global_key_value_heads", fields.kv_heads("num_key_value_heads", heads))
        if heads % kv_heads:
            raise fields.unfit("num_global_key_value_heads", f"a divisor of the {heads} attention heads")
        return head_dim, kv_heads
    full = [layer for layer in range(layers) if layer not in sliding]
    default = fields.integer("head_dim", _HEAD_DIM, least=2), fields.kv_heads("num_key_value_heads", heads)
    pairs = dict[int, tuple[Any, Any]]()
    if isinstance(by_layer, Mapping):
        pairs = {layer: _layer_heads(by_layer.get(str(layer)) or {}, default) for layer in range(layers)}
    head_dim, kv_heads = pairs.get(full[0]) or (0, 0)
    fits = is_whole(head_dim, 2, SIZE) and is_whole(kv_heads, 1, heads) and not heads % kv_heads
    if not fits or any(pair != ((head_dim, kv_heads) if layer in full else default) for layer, pair in pairs.items()):
        raise fields.unfit(
            "per_layer_config",
            f"'head_dim' and a 'num_key_value_heads' that divides {heads}, the same for all layers of {FULL!r}, and "
            "nothing for others",
        )
    return head_dim, kv_heads


def _layer_heads(layer: object, default: tuple[int, int]) -> tuple[Any, Any]:
    """Width and number of K/V heads of one entry of `per_layer_config`, unchecked; zeros if it is not an object."""
    if not isinstance(layer, Mapping):
        return 0, 0
    return layer.get("head_dim", default[0]), layer.get("num_key_value_heads", default[1])


def _rope(fields: Fields, kind: str, head_dim: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling of RoPE in layers of a `kind`, whose heads have `head_dim` channels."""
    if head_dim % 2:
        raise fields.unfit("head_dim", "an even number, as RoPE turns channels in pairs")
    parameters = fields.get("rope_parameters")
    if parameters is None:
        parameters = {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        }
    inner = parameters.get(kind) if isinstance(parameters, Mapping) else None
    if not isinstance(inner, Mapping):
        raise fields.unfit("rope_parameters", f"an object of objects, with {kind!r}")
    keys = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
    if set(inner) - keys:
        raise fields.unfit("rope_parameters", f"objects of {', '.join(sorted(keys))}")
    rope = Fields(f"{_SOURCE}, 'rope_parameters', {kind!r}", inner)
    theta = rope.number("rope_theta")
    if kind == SLIDING or rope.get("rope_type") != "proportional":
        rope.only("rope_type", "default", optional=True)
        rope.only("partial_rotary_factor", 1.0, optional=True)
        return theta, None
    share = rope.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise rope.unfit("partial_rotary_factor", "a share up to 1 of the pairs of channels")
    return theta, RopeScaling("proportional", factor=rope.number("factor", 1.0), share=share)


def _sliding(layers: tuple[int, ...], window: int, theta: float, kv_heads: int, head_dim: int) -> Sliding | None:
    """The sliding layers, or None. A row sees `window` positions up to its own; all rows of a canvas as far back."""
    if not layers:
        return None
    return Sliding(layers, window - 1, theta, behind=True, kv_heads=kv_heads, head_dim=head_dim)


def _mixture(experts: int, active: int, intermediate: int, shared: int) -> Mixture:
    return Mixture(experts, active, intermediate, shared, router=Router(normalise=True), normed=True)


# Keys of generation_config.json. The first are parameters of the same names in `renoising`.
_RENOISING = ("t_min", "t_max", "stability_threshold", "confidence_threshold")
_STEPS, _SAMPLER, _KIND, _BOUND = "max_denoising_steps", "sampler_config", "EntropyBoundSamplerConfig", "entropy_bound"


def _read_generation(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Sampling parameters of a `DiffusionGemmaGenerationConfig` of transformers, and its keys that none expresses.

    The sampler is named by its class. Only the sampler with a bound on entropies is read: `renoising.entropy_bound`.
    """
    unread = {key: value for key, value in raw.items() if value is not None}
    renoising = {key: unread.pop(key) for key in _RENOISING if key in unread}
    steps, sampler = unread.pop(_STEPS, None), unread.get(_SAMPLER)
    if isinstance(sampler, Mapping) and sampler.get("_cls_name", _KIND) == _KIND:
        del unread[_SAMPLER]
        settings = {key: value for key, value in sampler.items() if key != "_cls_name" and value is not None}
        renoising |= {_BOUND: settings.pop(_BOUND)} if _BOUND in settings else {}
        unread |= {f"{_SAMPLER}.{key}": value for key, value in settings.items()}
    sampling = {} if steps is None else {"steps_per_block": steps}
    return sampling | ({"renoising": renoising} if renoising else {}), sorted(unread)


def _factors(raw: Mapping[str, Any]) -> Factors:  # noqa: ARG001 - of all models of the family
    return Factors(unscaled=True)


DIFFUSION_GEMMA = Family(
    name="diffusion-gemma",
    model_types=("diffusion_gemma",),
    architectures=("DiffusionGemmaForBlockDiffusion",),
    names=replace(
        qwen.HEAD_NORM_NAMES,
        embed="model.decoder.embed_tokens",
        norm="model.decoder.norm",
        layer="model.decoder.layers.{}.",
        attn_post="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        ffn_post="post_feedforward_layernorm",
        scales=("model.encoder.language_model.layers.{}.layer_scalar", "model.decoder.layers.{}.layer_scalar"),
        signal="model.decoder.self_conditioning.",
        mixture=MixtureNames(
            router="router.proj",
            shared="mlp.",
            stacked=("experts.gate_up_proj", "experts.down_proj"),
            router_norm="router.scale",
            expert_norm="pre_feedforward_layernorm_2.weight",
            expert_post="post_feedforward_layernorm_2.weight",
            shared_post="post_feedforward_layernorm_1.weight",
            factors="router.per_expert_scale",
        ),
    ),
    config=_config,
    factors=_factors,
    read_generation=_read_generation,
    # Copies of the decoder's weights in the text encoder, and the tensors for images.
    unread=r"model\.encoder\.(vision_tower|embed_vision)\..*|model\.encoder\.language_model\.(?!.*layer_scalar).*",
    harmless=frozenset({"vision_config"}),
    presets=shapes_of(
        "diffusion-gemma",
        {
            "diffusiongemma-26b-a4b": {
                "sliding": _sliding(tuple(n for n in range(30) if (n + 1) % _PATTERN), 1024, 10_000.0, 8, 256),
                "embed_scale": 2816**0.5,
                "mixture": _mixture(128, 8, 704, 2112),
            },
            "diffusion-gemma-tiny": {
                "sliding": _sliding((0, 1), 10, 10_000.0, 2, 16),
                "embed_scale": 8.0,
                "mixture": _mixture(8, 2, 48, 96),
            },
        },
        rope_scaling=RopeScaling("proportional", factor=1.0, share=0.25),
        logit_cap=30.0,
        **_SWITCHES,
    ),
)
