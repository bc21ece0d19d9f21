"""Adapters that PEFT makes and saves, for checkpoints that the tests write.

PEFT changes modules, so it is given a tree of them under the names of the checkpoint's matrices. What it merges into
these is the reference for what is loaded.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tests.checkpoint.checkpoints import random_tensors, write

RANK = 3


class Tree(nn.Module):
    """Linear layers under the names of a checkpoint's matrices, and an embedding; `ahead` is left out of the names."""

    def __init__(self, tensors: dict[str, Tensor], ahead: str = "") -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf, last = name.removeprefix(ahead).split(".")
            if last != "weight" or tensor.dim() != 2:
                continue
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            embedding = leaf in ("wte", "embed_tokens")
            made = nn.Embedding(*tensor.shape) if embedding else nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
            made.weight.data = tensor.clone()
            owner.add_module(leaf, made)


def adapted(
    folder: Path, tensors: dict[str, Tensor], seed: int = 0, *, ahead: str = "", **config: Any
) -> dict[str, Tensor]:
    """Save a random adapter of `tensors` in `folder`, and return the tensors into which PEFT has merged it."""
    torch.manual_seed(seed)
    settings = {"r": RANK, "lora_alpha": 5, "init_lora_weights": False} | config
    model = get_peft_model(Tree(tensors, ahead), LoraConfig(**settings))
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and "default" in layer.lora_A:
            base, down, up = (
                each.get_parameter("weight")
                for each in (layer.get_base_layer(), layer.lora_A["default"], layer.lora_B["default"])
            )
            down.data = torch.randn_like(down) / down.shape[0] ** 0.5
            up.data = torch.randn_like(up) * 0.3 * (base.std() or 1)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    merged = {ahead + name: value for name, value in model.merge_and_unload().state_dict().items()}
    return tensors | {name: value.contiguous() for name, value in merged.items() if name in tensors}


def base_and_adapted(folder: Path, raw: dict[str, Any], seed: int = 0, **config: Any) -> tuple[Path, Path, Path]:
    """A random checkpoint, an adapter of it, and the checkpoint into which PEFT has merged it."""
    tensors = random_tensors(raw, seed)
    merged = adapted(folder / "adapter", tensors, seed, **config)
    return write(folder / "base", raw, tensors), folder / "adapter", write(folder / "merged", raw, merged)
