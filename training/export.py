"""Writes a trained model as a folder in the Hugging Face layout of LLaDA, and reads its weights back."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from training.model import DenseLlada

PREFIX = "model.transformer."


def config(model: DenseLlada, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Returns `config.json` with the keys of the published LLaDA checkpoints.

    All but `auto_map`: it would name modelling code that the folder does not hold, and `AutoTokenizer` would ask
    whether to trust it.
    """
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


def export(model: DenseLlada, tokenizer: PreTrainedTokenizerFast, folder: Path, sampling: Mapping[str, int]) -> None:
    """Writes configuration, float16 weights, and the sampling parameters that the model is trained for.

    Tied embeddings are stored once, as `wte`. Where they are scaled as they are read, `wte` holds the scaled ones and
    `ff_out` those that predict.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model, tokenizer), indent=1) + "\n")
    weights = dict(model.state_dict())
    if model.shape.embedding_scale != 1.0:
        weights |= {
            "wte.weight": weights["wte.weight"] * model.shape.embedding_scale,
            "ff_out.weight": weights["wte.weight"],
        }
    (folder / "remask.json").write_text(json.dumps({"sampling": dict(sampling)}, indent=1) + "\n")
    tensors = {PREFIX + name: tensor.detach().cpu().half().contiguous() for name, tensor in weights.items()}
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    # safetensors creates the file for its owner only; a packaged model is for everyone to read.
    file.chmod(0o644)


def load_weights(model: DenseLlada, folder: Path) -> None:
    """Fills `model` in float32 from the weights of an exported folder."""
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix(PREFIX): tensor.to(torch.float32) for name, tensor in tensors.items()})
