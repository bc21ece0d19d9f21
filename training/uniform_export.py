"""Writes a trained uniform model as a folder in the Hugging Face layout of GIDD."""

import json
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from remask.tasks import relay
from training.relay_tokenizer import save_tokenizer
from training.uniform_model import DenseGidd


def config(model: DenseGidd, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Returns `config.json` with the keys of the published GIDD checkpoints.

    All but `auto_map`, which would name modelling code that the folder does not hold, and `rope_scaling`, which is null
    there and makes newer versions of transformers warn.
    """
    shape = model.shape
    return {
        "architectures": ["GiddForDiffusionLM"],
        "attention_bias": True,
        "attn_performer": "eager",
        "attn_soft_cap": shape.attn_soft_cap,
        "bos_token_id": tokenizer.bos_token_id,
        "dtype": "float16",
        "eos_token_id": tokenizer.eos_token_id,
        "head_dim": shape.head_dim,
        "head_scaling": 1.0,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "is_causal": False,
        "mask_token_id": tokenizer.mask_token_id,
        "max_log_snr": 9.0,
        "max_position_embeddings": shape.max_position_embeddings,
        "min_log_snr": -9.0,
        "mlp_bias": True,
        "model_type": "gidd",
        "noise_type": 1000.0,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "pad_token_id": tokenizer.pad_token_id,
        "resid_scale": shape.resid_scale,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        # Published configurations do not have this key, which stands for the structured mask where it is missing.
        **({} if shape.structured_attention else {"structured_attention": False}),
        "tie_word_embeddings": True,
        "transformers_version": "4.57.6",
        "use_qk_norm": True,
        "vocab_size": shape.vocab_size,
        "weight_scaling": 1.0,
    }


def export(model: DenseGidd, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes configuration, float16 weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model, tokenizer), indent=1) + "\n")
    (folder / "remask.json").write_text(json.dumps({"sampling": relay.UNIFORM_SAMPLING}, indent=1) + "\n")
    state = model.state_dict()
    tensors = {f"model.{name}": tensor.detach().cpu().half().contiguous() for name, tensor in state.items()}
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    # safetensors creates the file for its owner only; a packaged model is for everyone to read.
    weights.chmod(0o644)
    save_tokenizer(folder)
