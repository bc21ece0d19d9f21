"""Writes a trained model as a folder in the Hugging Face layout of its family, and reads its weights back."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from training.layouts import config, tensor_name
from training.model import MaskedModel


def export(model: MaskedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, sampling: Mapping[str, int]) -> None:
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
    tensors = {tensor_name(model, name): tensor.detach().cpu().half().contiguous() for name, tensor in weights.items()}
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    # safetensors creates the file for its owner only; a packaged model is for everyone to read.
    file.chmod(0o644)


def load_weights(model: MaskedModel, folder: Path) -> None:
    """Fills `model` in float32 from the weights of an exported folder."""
    tensors = load_file(folder / "model.safetensors")
    names = {name: tensor_name(model, name) for name in model.state_dict()}
    if model.shape.embedding_scale != 1.0:
        names["wte.weight"] = tensor_name(model, "ff_out.weight")  # the ones that are not scaled
    model.load_state_dict({ours: tensors[theirs].to(torch.float32) for ours, theirs in names.items()})
