"""Low-rank adapters in the layout of PEFT: `W + alpha / rank * B A` on the matrices of all layers."""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LowRankLinear(nn.Module):
    """A frozen matrix and its low-rank change, added up before the product: one product of full speed a pass."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        a = torch.empty(rank, base.in_features, device=base.weight.device)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def merged(self) -> Tensor:
        """The sum of both."""
        return self.base.weight + self.scale * (self.b @ self.a)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in] times the sum."""
        return F.linear(x, self.merged(), self.base.bias)


def add_low_rank(model: nn.Module, rank: int, alpha: float) -> list[nn.Parameter]:
    """Put a `LowRankLinear` in the place of every matrix of `TARGETS`. Returns what is trained."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in TARGETS and isinstance(child, nn.Linear):
                setattr(parent, name, LowRankLinear(child, rank, alpha / rank))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def low_rank_modules(model: nn.Module) -> dict[str, LowRankLinear]:
    """By their names in the base."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRankLinear)}


def save_adapter(model: nn.Module, folder: Path, alpha: float, base: str) -> None:
    """Write PEFT's two files, the factors in half precision. A file that is there is replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, rank = {}, 0
    for name, module in low_rank_modules(model).items():
        rank = module.a.shape[0]
        for letter, factor in (("A", module.a), ("B", module.b)):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = factor.detach().half().cpu().contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(TARGETS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file.with_suffix(".tmp"), metadata={"format": "pt"})
    os.replace(file.with_suffix(".tmp"), file)


def adapter_config(folder: Path) -> dict[str, Any]:
    """What PEFT's file says of the adapter: `r` is its rank, `lora_alpha` / `r` its scale."""
    return dict(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")))


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Put the factors of PEFT's files into the model. All of them must be there."""
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    with torch.no_grad():
        for name, module in low_rank_modules(model).items():
            module.a.copy_(tensors[f"base_model.model.{name}.lora_A.weight"])
            module.b.copy_(tensors[f"base_model.model.{name}.lora_B.weight"])
