"""A mixture of experts: which experts compute a row, and the products of rows that are grouped by expert.

A row's output depends on no other row, but where rows of a routing block choose from one pool of experts (LLaDA2.2).
No expert has a capacity, and no row is dropped. Nothing is allocated that has rows, experts and channels at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from remask.model.arithmetic import Arithmetic
from remask.model.config import Activation, Router
from remask.model.weights import MixtureWeights


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of N rows, k of each in the order of their scores."""

    experts: Tensor  # int64 [N, k]
    weights: Tensor  # [N, k], of the experts' outputs


def route(x: Tensor, router: Router, active: int, w: MixtureWeights, arithmetic: Arithmetic) -> Routes:
    """Choose `active` experts of each of the rows `x` [N, D].

    A softmax without normalisation is LLaDA-MoE's rule, with it Qwen3-MoE's. Sigmoid scores with a bias for the choice
    and groups of experts are DeepSeek-V3's (arXiv 2412.19437, section 2.1.2), and LLaDA2's. A pool of experts for the
    rows of a block is LLaDA2.2's; then `x` holds whole routing blocks, one after the other.
    """
    logits = arithmetic.linear(x.to(w.router.dtype), w.router).float()
    scores = arithmetic.sigmoid(logits) if router.score == "sigmoid" else logits.softmax(dim=-1)
    ranked = scores if w.bias is None else scores + w.bias
    if router.kept_groups < router.groups:
        ranked = _within_groups(ranked, router)
    if router.pool:
        ranked = _within_pools(ranked, router)
    experts = _largest(ranked, active) if router.pool else ranked.topk(active, dim=-1).indices
    weights = scores.gather(1, experts)
    if router.normalise:
        # Added one by one: how a sum over a short dimension is rounded depends on the number of rows.
        total = sum(weights.unbind(dim=1)[1:], weights[:, 0])
        weights = weights / (total[:, None] + 1e-20)
    weights = weights * router.scale
    if w.factors is not None:
        weights = weights * w.factors[experts]
    return Routes(experts, weights if router.float32 else weights.to(x.dtype))


def feed(
    x: Tensor,
    routes: Routes,
    w: MixtureWeights,
    arithmetic: Arithmetic,
    local: range | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """The weighted sum of the chosen experts' outputs of the rows `x` [N, D], of their dtype.

    `w` holds the `local` experts; None: all. Outputs of others are left out: other ranks compute them.
    """
    local = range(len(w.router)) if local is None else local
    active, count = routes.experts.shape[1], len(local)
    experts = routes.experts.flatten()
    if count < len(w.router):
        # Experts of other ranks get a number after all others, so that their rows come last and are in no group.
        experts = torch.where((experts >= local.start) & (experts < local.stop), experts - local.start, count)
    chosen, order = experts.sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(count, device=x.device), right=True, out_int32=True)
    gate, up = arithmetic.grouped(x[order // active], w.gate_up, ends).chunk(2, dim=-1)
    out = arithmetic.grouped(arithmetic.activate_(gate, activation).mul_(up), w.down, ends)
    out = out * routes.weights.flatten()[order, None]
    if count < len(w.router):
        out.masked_fill_((chosen == count)[:, None], 0)  # no product has written these rows
    parts = torch.empty_like(out).index_copy_(0, order, out).view(len(x), active, out.shape[1])
    # In the order of the ranks, each sum rounded once: a row's bits depend on that row alone.
    total = parts[:, 0]
    for rank in range(1, active):
        total = total + parts[:, rank]
    return total.to(x.dtype)


def _within_groups(ranked: Tensor, router: Router) -> Tensor:
    """`ranked` [N, E], with -inf for the experts of groups that are not kept."""
    groups = torch.unflatten(ranked, 1, (router.groups, -1))
    best = groups.topk(2, dim=-1).values
    chosen = (best[..., 0] + best[..., 1]).topk(router.kept_groups, dim=-1).indices
    dropped = torch.ones_like(best[..., 0], dtype=torch.bool).scatter_(1, chosen, False)
    return groups.masked_fill(dropped[..., None], -torch.inf).flatten(1)


def _within_pools(ranked: Tensor, router: Router) -> Tensor:
    """`ranked` [N, E], with -inf for the experts that are not in the pool of a row's routing block."""
    blocks = torch.unflatten(ranked, 0, (-1, router.block))
    pool = _largest(blocks.amax(dim=1), router.pool)
    dropped = torch.ones_like(blocks[:, 0], dtype=torch.bool).scatter_(1, pool, False)
    return blocks.masked_fill(dropped[:, None], -torch.inf).flatten(0, 1)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of each row, the first of equal ones, int64 [rows, count]; topk takes any."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]
