"""A mixture of experts in the place of an MLP, for training: LLaDA-MoE's router, a softmax without normalisation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Experts:
    """How many experts a layer has, how many of them compute a row, and their width."""

    count: int
    active: int
    hidden: int


class Expert(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.ff_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ff_out(F.silu(self.ff_proj(x)) * self.up_proj(x))
        return out


class Mixture(nn.Module):
    """Each row is computed by the experts that its router scores highest."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.active = experts.active
        self.router = nn.Linear(width, experts.count, bias=False)
        self.experts = nn.ModuleList(Expert(width, experts.hidden) for _ in range(experts.count))
        self.imbalance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """The output of rows `x` [..., width]; `imbalance` is that of these rows from then on.

        It is 1 where all experts get equally many rows, and larger otherwise (Switch Transformers, arXiv 2101.03961,
        equation 4).
        """
        rows = x.flatten(0, -2)
        scores = self.router(rows).softmax(dim=-1)
        weights, chosen = scores.topk(self.active, dim=-1)
        shares = F.one_hot(chosen, len(self.experts)).float().mean(dim=(0, 1))
        self.imbalance = len(self.experts) * (shares * scores.mean(dim=0)).sum()
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, rank = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, weights[row, rank, None] * expert(rows[row]))
        return out.view_as(x)
