"""Top-p, top-k and reproducible draws over rows of logits. Nothing here changes its inputs."""

import torch
from torch import Tensor


def top_p(logits: Tensor, share: float | None) -> Tensor:
    """Keep the smallest set of tokens of total probability `share`, the token that crosses it included; [rows, V]."""
    if share is None or share >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, before > share)
    return logits.masked_fill(dropped, -torch.inf)


def top_k(logits: Tensor, count: int | None) -> Tensor:
    """Keep the `count` most probable tokens, and ties with the last of them; [rows, V]."""
    if count is None or count >= logits.shape[-1]:
        return logits
    kth = logits.topk(count, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def draw(logits: Tensor, seed: int) -> Tensor:
    """Draw a token of every row from the softmax of `logits`, int64 [rows], with `seed` as the only randomness."""
    return (logits - exponential_logs(logits, logits.shape[1], seed)).argmax(dim=-1)


def exponential_logs(like: Tensor, tokens: int, seed: int) -> Tensor:
    """Logarithms of exponential draws, [rows, tokens], with as many rows as `like` has.

    The argmax of logits + Gumbel noise draws from their softmax, and -log of an exponential draw is Gumbel.
    """
    generator = torch.Generator(device=like.device)
    generator.manual_seed(seed)
    return like.new_empty((len(like), tokens)).exponential_(generator=generator).log_()
