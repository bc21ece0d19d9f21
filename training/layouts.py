"""`config.json` and tensor names of the published checkpoints of each family that a trained model may have."""

from transformers import PreTrainedTokenizerFast

from training.model import MaskedModel

_LLADA = "model.transformer."
_MLP = {"ff_proj": "gate_proj", "up_proj": "up_proj", "ff_out": "down_proj"}
_QWEN = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    **{ours: f"mlp.{theirs}" for ours, theirs in _MLP.items()},
}


def tensor_name(model: MaskedModel, name: str) -> str:
    """The published name of one of the model's parameters, or of `ff_out.weight`, the embeddings that predict."""
    if model.shape.family == "llada":
        return _LLADA + name
    match name.split("."):
        case ["wte", leaf]:
            return f"model.embed_tokens.{leaf}"
        case ["ln_f", leaf]:
            return f"model.norm.{leaf}"
        case ["ff_out", leaf]:
            return f"lm_head.{leaf}"
        case ["blocks", layer, "mixture", "router", leaf]:
            return f"model.layers.{layer}.mlp.gate.{leaf}"
        case ["blocks", layer, "mixture", "experts", expert, part, leaf]:
            return f"model.layers.{layer}.mlp.experts.{expert}.{_MLP[part]}.{leaf}"
        case ["blocks", layer, part, leaf]:
            return f"model.layers.{layer}.{_QWEN[part]}.{leaf}"
    raise KeyError(name)


def config(model: MaskedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Returns `config.json` with the keys of the family's published checkpoints.

    All but `auto_map`: it would name modelling code that the folder does not hold, and `AutoTokenizer` would ask
    whether to trust it.
    """
    make = {"llada": _llada_config, "dream": _dream_config, "llada-moe": _llada_moe_config}[model.shape.family]
    return make(model, tokenizer)


def _llada_config(model: MaskedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    shape = model.shape
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": shape.d_model,
        "embedding_dropout": 0.0,
        "embedding_size": shape.vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": tokenizer.mask_token_id,
        "max_sequence_length": shape.max_sequence_length,
        "mlp_hidden_size": shape.mlp_hidden_size,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_heads,
        "n_layers": shape.n_layers,
        "pad_token_id": tokenizer.pad_token_id,
        "precision": "fp32",
        "residual_dropout": 0.0,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": shape.rope_theta,
        "scale_logits": False,
        "torch_dtype": "float16",
        "transformers_version": "4.46.2",
        "use_cache": False,
        "vocab_size": shape.vocab_size,
        "weight_tying": shape.embedding_scale == 1.0,
    }


def _qwen_config(model: MaskedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """The keys that Dream and LLaDA-MoE share."""
    shape = model.shape
    return {
        "attention_dropout": 0.0,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": shape.d_model,
        "initializer_range": 0.02,
        "mask_token_id": tokenizer.mask_token_id,
        "max_position_embeddings": shape.max_sequence_length,
        "num_attention_heads": shape.n_heads,
        "num_hidden_layers": shape.n_layers,
        "num_key_value_heads": shape.n_heads,
        "pad_token_id": tokenizer.pad_token_id,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.embedding_scale == 1.0,
        "torch_dtype": "float16",
        "transformers_version": "4.46.2",
        "use_cache": False,
        "vocab_size": shape.vocab_size,
    }


def _dream_config(model: MaskedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        **_qwen_config(model, tokenizer),
        "architectures": ["DreamModel"],
        "intermediate_size": model.shape.mlp_hidden_size,
        "model_type": "Dream",
        "use_sliding_window": False,
    }


def _llada_moe_config(model: MaskedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    experts, layers = model.shape.experts, model.shape.n_layers
    assert experts is not None, "a LLaDA-MoE has experts"
    return {
        **_qwen_config(model, tokenizer),
        "architectures": ["LLaDAMoEModelLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "expert_intermediate_size": experts.hidden,
        "model_type": "llada",
        "moe_layer_freq": [1] * layers,
        "moe_router_enable_expert_bias": False,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "partial_rotary_factor": 1,
        "qk_layernorm": False,
        "shared_expert_intermediate_size": None,
    }
