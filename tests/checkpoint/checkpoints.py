"""Tiny checkpoint folders in the layouts of the hub, written by the tests that need them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from remask.families import family_of

LAYERS, HIDDEN, HEADS, KV, INNER, VOCAB = 2, 16, 4, 2, 24, 40
KV_ROWS = HIDDEN // HEADS * KV

LLADA: dict[str, Any] = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "include_bias": False,
    "weight_tying": False,
    "d_model": HIDDEN,
    "n_heads": HEADS,
    "n_kv_heads": KV,
    "n_layers": LAYERS,
    "mlp_hidden_size": INNER,
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "max_sequence_length": 64,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "mask_token_id": 39,
    "eos_token_id": 38,
}

DREAM: dict[str, Any] = {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "mask_token_id": 39,
    "eos_token_id": 38,
}

GIDD: dict[str, Any] = {
    "model_type": "gidd",
    "architectures": ["GiddForDiffusionLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "use_qk_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
    "attn_soft_cap": 30.0,
    "resid_scale": 4.0,
    "head_scaling": 0.5,
    "weight_scaling": 1.0,
    "noise_type": 1000.0,
    "min_log_snr": -9.0,
    "max_log_snr": 9.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}

SDAR: dict[str, Any] = {
    "model_type": "sdar",
    "architectures": ["SDARForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": 8,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "block_size": 4,
    "mask_token_id": 39,
    "eos_token_id": 38,
}

# As second-hand descriptions of the published file have it: it names no mask.
ILLADA: dict[str, Any] = {
    "model_type": "illada",
    "architectures": ["ILLaDAForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAST_DLLM_V2 = DREAM | {
    "model_type": "Fast_dLLM_Qwen",
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "bd_size": 8,
}

LLADA_MOE: dict[str, Any] = {
    "model_type": "llada",
    "architectures": ["LLaDAMoEModelLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": LAYERS,
    "dense_intermediate_size": INNER,
    "expert_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "moe_layer_freq": [0, 1],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_router_enable_expert_bias": False,
    "qk_layernorm": True,
    "clip_qkv": None,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 50000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "mask_token_id": 39,
    "eos_token_id": 38,
}

LLADA2: dict[str, Any] = {
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": 8,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "norm_head": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "partial_rotary_factor": 0.5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 600000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "mask_token_id": 39,
    "pad_token_id": 38,
}

SDAR_MOE = SDAR | {
    "model_type": "sdar_moe",
    "architectures": ["SDARMoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

_LLADA_LAYER = {
    "attn_norm.weight": (HIDDEN,),
    "q_proj.weight": (HIDDEN, HIDDEN),
    "k_proj.weight": (KV_ROWS, HIDDEN),
    "v_proj.weight": (KV_ROWS, HIDDEN),
    "attn_out.weight": (HIDDEN, HIDDEN),
    "ff_norm.weight": (HIDDEN,),
    "ff_proj.weight": (INNER, HIDDEN),
    "up_proj.weight": (INNER, HIDDEN),
    "ff_out.weight": (HIDDEN, INNER),
}

_DREAM_LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.q_proj.bias": (HIDDEN,),
    "self_attn.k_proj.weight": (KV_ROWS, HIDDEN),
    "self_attn.k_proj.bias": (KV_ROWS,),
    "self_attn.v_proj.weight": (KV_ROWS, HIDDEN),
    "self_attn.v_proj.bias": (KV_ROWS,),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}


def llada_tensors(*, tied: bool = False) -> dict[str, Tensor]:
    """Random float32 tensors under LLaDA's names."""
    shapes = {"model.transformer.wte.weight": (VOCAB, HIDDEN), "model.transformer.ln_f.weight": (HIDDEN,)}
    if not tied:
        shapes["model.transformer.ff_out.weight"] = (VOCAB, HIDDEN)
    return _random(shapes, "model.transformer.blocks.{}.", _LLADA_LAYER)


def dream_tensors() -> dict[str, Tensor]:
    """Random float32 tensors under Dream's names."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return _random(shapes, "model.layers.{}.", _DREAM_LAYER)


def random_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random float32 tensors of a checkpoint that make it lively: nothing is near uniform.

    Projections are scaled so that their outputs are as wide as their inputs, whatever the model multiplies them with.
    MASK is never the most probable token.
    """
    family, generator = family_of(raw), torch.Generator().manual_seed(seed)
    config, factors = family.config(raw), family.factors(raw)
    tensors: dict[str, Tensor] = {}
    for slot in family.tensors(config):
        drawn = torch.randn(slot.shape, generator=generator)
        if slot.name == family.head:
            drawn *= 4 / config.hidden**0.5 / factors.head
            drawn[config.mask_id] = 0
        elif slot.field == "embed" and config.tied:  # it is the head too
            drawn[config.mask_id] *= 0.1
        elif slot.name.endswith(".weight") and len(slot.shape) == 2 and slot.field != "embed":
            drawn *= 1.5 / slot.shape[1] ** 0.5 / factors.of(slot.shape)
        elif len(slot.shape) == 1:
            drawn = drawn * 0.2 + (1 - factors.gain if "norm" in slot.name else 0)
        tensors[slot.name] = drawn
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, shards: int = 1) -> Path:
    """Writes a checkpoint of one file, or of `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    placed: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = {name: tensors[name] for name in names[shard::shards]}
        save_file(held, folder / file)
        placed |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def _random(shapes: dict[str, tuple[int, ...]], prefix: str, layer: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    every = shapes | {prefix.format(number) + name: shape for number in range(LAYERS) for name, shape in layer.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in every.items()}
