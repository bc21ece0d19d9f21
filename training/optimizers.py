"""Optimizers and the schedule of their rate, as both bundled models are trained."""

from collections.abc import Iterable

import torch
from torch import nn

Optimizers = list[torch.optim.Optimizer]


def learning_rate(step: int, spent: float) -> float:
    """Returns the share of the peak rate: a linear rise over 40 steps, a linear fall in the last 40 % of the time."""
    return min((step + 1) / 40, 1.0, max(0.02, (1 - spent) / 0.4))


def build(model: nn.Module, embedding: str, rate: float) -> Optimizers:
    """Muon for the matrices inside the layers, AdamW for all else and for what `embedding` begins the name of.

    Mixtures are AdamW's too: Muon takes longer over many small matrices than a step takes.
    """
    named = list(model.named_parameters())
    by_muon = {name for name, p in named if p.ndim == 2 and not name.startswith(embedding) and ".mixture." not in name}
    matrices = [p for name, p in named if name in by_muon]
    others = [p for name, p in named if name not in by_muon]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def update(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, rate: float) -> None:
    """Takes one step at `rate` along the gradients, whose norm is clipped at 1, and clears them."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
