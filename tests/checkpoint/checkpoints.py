"""Tiny checkpoint folders in the layouts of the hub, written by the tests that need them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from remask.checkpoint.load import load_weights, read_config
from remask.families import family_of
from remask.model.quantized import QuantizedMatrix
from remask.model.weights import Weights

LAYERS, HIDDEN, HEADS, KV, INNER, VOCAB = 2, 16, 4, 2, 24, 40

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

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "mask_token_id": 39,
    "eos_token_id": 38,
}

DREAM = _COMMON | {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
}

GIDD = {key: value for key, value in _COMMON.items() if key not in ("num_key_value_heads", "mask_token_id")} | {
    "model_type": "gidd",
    "architectures": ["GiddForDiffusionLM"],
    "head_dim": HIDDEN // HEADS,
    "rope_theta": 10000.0,
    "rope_scaling": None,
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
    "eos_token_id": 1,
}

SDAR = _COMMON | {
    "model_type": "sdar",
    "architectures": ["SDARForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 8,
    "rope_theta": 1000000.0,
    "block_size": 4,
}

# As second-hand descriptions of the published file have it: it names no mask.
ILLADA = {key: value for key, value in _COMMON.items() if key != "mask_token_id"} | {
    "model_type": "illada",
    "architectures": ["ILLaDAForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

A2D = ILLADA | {
    "model_type": "a2d-llama",
    "architectures": ["A2DLlamaLMHeadModel"],
    "mask_token_id": VOCAB - 1,
    "right_shift_logits": True,
}

# The published file names no mask.
STABLE_DIFFCODER = ILLADA | {
    "model_type": "llama",
    "architectures": ["StableDiffcoderForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"},
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}

MODERNBERT: dict[str, Any] = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForMaskedLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 4,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "norm_eps": 1e-05,
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "tie_word_embeddings": True,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_attention": 8,
    "local_rope_theta": 10000.0,
    "mask_token_id": VOCAB - 1,
    "eos_token_id": VOCAB - 2,
}

FAST_DLLM_V2 = DREAM | {
    "model_type": "Fast_dLLM_Qwen",
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "bd_size": 8,
}

NEMOTRON = {key: value for key, value in DREAM.items() if key != "auto_map"} | {
    "model_type": "nemotron_labs_diffusion",
    "architectures": ["NemotronLabsDiffusionModel"],
    "head_dim": 8,
    "block_size": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "dlm_paradigm": "bidirectional",
}

DIFFUSION_GEMMA: dict[str, Any] = {
    "model_type": "diffusion_gemma",
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "canvas_length": 4,
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": 4,
        "global_head_dim": 8,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": LAYERS,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "intermediate_size": INNER,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-06,
        "eos_token_id": 38,
    },
}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}

LLADA_MOE = {key: value for key, value in _COMMON.items() if key != "intermediate_size"} | {
    **_EXPERTS,
    "model_type": "llada",
    "architectures": ["LLaDAMoEModelLM"],
    "hidden_act": "silu",
    "dense_intermediate_size": INNER,
    "expert_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "moe_layer_freq": [0, 1],
    "moe_router_enable_expert_bias": False,
    "qk_layernorm": True,
    "clip_qkv": None,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 50000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
}

LLADA2 = {key: value for key, value in _COMMON.items() if key != "eos_token_id"} | {
    **_EXPERTS,
    "model_type": "llada2_moe",
    "architectures": ["LLaDA2MoeModelLM"],
    "hidden_act": "silu",
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 6,
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
    "rope_theta": 600000,
    "rope_scaling": None,
    "use_sliding_window": False,
    "pad_token_id": 38,
}

SUMI = {key: value for key, value in _COMMON.items() if key != "mask_token_id"} | {
    "model_type": "sumi",
    "architectures": ["SumiForMaskGeneration"],
    "hidden_act": "silu",
    "head_dim": 8,
    "attention_bias": False,
    "add_qkv_bias": True,
    "mlp_bias": False,
    "bos_token_id": 37,
    "rope_theta": 500000.0,
}

SDAR_MOE = SDAR | {
    **_EXPERTS,
    "model_type": "sdar_moe",
    "architectures": ["SDARMoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
}


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


def weights_of(checkpoint: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Weights:
    """The weights of a folder or a GGUF file, on the CPU."""
    family, config = read_config(checkpoint)
    return load_weights(checkpoint, family, config, dtype, torch.device("cpu"), progress=False, **more)


def same(ours: Weights, theirs: Weights) -> None:
    """Fails where a tensor differs in a bit, or is kept in other codes."""
    for (field, layer, own), (name, number, other) in zip(ours.named_tensors(), theirs.named_tensors(), strict=True):
        assert (field, layer, type(own)) == (name, number, type(other))
        each = [matrix.parts() if isinstance(matrix, QuantizedMatrix) else {"": matrix} for matrix in (own, other)]
        assert all(torch.equal(part, each[1][kind]) for kind, part in each[0].items()), (field, layer)
