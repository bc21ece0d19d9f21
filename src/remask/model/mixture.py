"""A mixture of experts: which experts compute a row, and the products of rows that are grouped by expert.

A row's output depends on no other row, unless rows of a routing block choose from one pool of experts (LLaDA2.2). No
expert has a capacity, and no row is dropped. No tensor has rows, experts and channels at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from remask.model.arithmetic import Arithmetic
from remask.model.config import Activation, Router
from remask.model.weights import MixtureWeights

_EPSILON = 1e-20  # as in DeepSeek-V3's router: keeps a division by 0 finite


@dataclass(frozen=True, slots=True)
class Routes:
    """The k experts chosen for each of N rows, in the order of their scores."""

    experts: Tensor  # int64 [N, k]
    weights: Tensor  # [N, k], factors of the experts' outputs


def route(x: Tensor, router: Router, active: int, w: MixtureWeights, arithmetic: Arithmetic) -> Routes:
    """Choose `active` experts for each of the rows `x` [N, D].

    Softmax scores are those of LLaDA-MoE and, with weights normalised, of Qwen3-MoE. Sigmoid scores with a bias for the
    choice and groups of experts are those of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and LLaDA2. A pool of
    experts for the rows of a block is LLaDA2.2's; `x` must then be whole routing blocks, one after the other.
    """
    logits = arithmetic.linear(x.to(w.router.dtype), w.router).float()
    scores = arithmetic.sigmoid(logits) if router.score == "sigmoid" else logits.softmax(dim=-1)
    ranked = scores if w.bias is None else scores + w.bias
    if router.kept_groups < router.groups:
        ranked = _mask_groups(ranked, router)
    if router.pool:
        ranked = _mask_pools(ranked, router)
    experts = _top_indices(ranked, active) if router.pool else ranked.topk(active, dim=-1).indices
    weights = scores.gather(1, experts)
    if router.normalise:
        # Added one by one: how a sum over a short dimension is rounded depends on the number of rows.
        total = sum(weights.unbind(dim=1)[1:], weights[:, 0])
        weights = weights / (total[:, None] + _EPSILON)
    weights = weights * router.scale
    if w.factors is not None:
        weights = weights * w.factors[experts]
    return Routes(experts, weights if router.float32 else weights.to(x.dtype))


def mixture_output(
    x: Tensor,
    routes: Routes,
    w: MixtureWeights,
    arithmetic: Arithmetic,
    local: range | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """The weighted sum [N, D] of the outputs of chosen experts for the rows `x` [N, D], in the dtype of `x`.

    The sum is over the `local` experts, whose matrices `w` has; None: over all. Other ranks compute the others.
    """
    local = range(len(w.router)) if local is None else local
    active, count = routes.experts.shape[1], len(local)
    experts = routes.experts.flatten()
    if count < len(w.router):
        # Experts of other ranks get the number `count`, so that their rows come last, in no group.
        experts = torch.where((experts >= local.start) & (experts < local.stop), experts - local.start, count)
    sorted_experts, order = experts.sort(stable=True)
    ends = torch.searchsorted(sorted_experts, torch.arange(count, device=x.device), right=True, out_int32=True)
    gate, up = arithmetic.grouped_linear(x[order // active], w.gate_up, ends).chunk(2, dim=-1)
    out = arithmetic.grouped_linear(arithmetic.activate_(gate, activation).mul_(up), w.down, ends)
    out = out * routes.weights.flatten()[order, None]
    if count < len(w.router):
        out.masked_fill_((sorted_experts == count)[:, None], 0)  # no product has written these rows
    outputs = torch.empty_like(out).index_copy_(0, order, out).view(len(x), active, out.shape[1])
    # Added one by one in the order of scores, so that a row's bits depend on that row alone.
    total = outputs[:, 0]
    for choice in range(1, active):
        total = total + outputs[:, choice]
    return total.to(x.dtype)


def _mask_groups(ranked: Tensor, router: Router) -> Tensor:
    """The scores `ranked` [N, E], with -inf outside of each row's `router.kept_groups` best groups.

    The best groups are those whose two best experts have the largest sum of scores.
    """
    groups = torch.unflatten(ranked, 1, (router.groups, -1))
    best, second = groups.topk(2, dim=-1).values.unbind(-1)
    best_groups = (best + second).topk(router.kept_groups, dim=-1).indices
    is_excluded = torch.ones_like(best, dtype=torch.bool).scatter_(1, best_groups, False)
    return groups.masked_fill(is_excluded[..., None], -torch.inf).flatten(1)


def _mask_pools(ranked: Tensor, router: Router) -> Tensor:
    """The scores `ranked` [N, E], with -inf for experts that are not in the pool of the row's routing block."""
    blocks = torch.unflatten(ranked, 0, (-1, router.block))
    pool = _top_indices(blocks.amax(dim=1), router.pool)
    is_excluded = torch.ones_like(blocks[:, 0], dtype=torch.bool).scatter_(1, pool, False)
    return blocks.masked_fill(is_excluded[:, None], -torch.inf).flatten(0, 1)


def _top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest in each row, int64 [rows, count]; of equal ones the first (`topk` takes any)."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]
