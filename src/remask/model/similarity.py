"""How alike the K or V of the same positions in two passes are."""

import torch
from torch import Tensor


def flat_products(a: Tensor, b: Tensor) -> Tensor:
    """Products over all tokens, heads and channels: a b, a a, b b. [P, H, Dh] twice -> float32 [3]."""
    a, b = a.float().flatten(1), b.float().flatten(1)
    # Token by token first: one float32 sum over millions of products would lose digits.
    return torch.stack([torch.linalg.vecdot(x, y).sum() for x, y in ((a, b), (a, a), (b, b))])


def joint_cosine(keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> Tensor:
    """One cosine over K and V as one vector (equation 3 read literally): two pairs [P, H, Dh] twice -> [].

    It weighs K and V by the squares of their norms, where the mean of two cosines weighs them alike.
    """
    dot, left, right = flat_products(*keys) + flat_products(*values)
    cosine: Tensor = dot / (left * right).sqrt()
    return cosine


def flat_cosine(a: Tensor, b: Tensor) -> Tensor:
    """One cosine over all tokens, heads and channels (BiCache section 4.1, equation 3). [P, H, Dh] twice -> []."""
    dot, left, right = flat_products(a, b)
    cosine: Tensor = dot / (left * right).sqrt()
    return cosine
