"""How the transformer computes over rows; `remask.models.invariant` has another way."""

import torch.nn.functional as F
from torch import Tensor


class Arithmetic:
    """Computes all rows at once.

    Attributes:
        invariant: whether the bits of a row depend on that row alone.
    """

    invariant = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` [N, K] times the transpose of `weight` [M, K], plus `bias` [M]: [N, M]."""
        return F.linear(x, weight, bias)

    def silu_(self, x: Tensor) -> Tensor:
        """SiLU of `x` [N, K], a part of the columns of another tensor, in place."""
        return F.silu(x, inplace=True)

    def placed(self, x: Tensor) -> Tensor:
        """`x`, at an address that does not change what is computed from it."""
        return x
