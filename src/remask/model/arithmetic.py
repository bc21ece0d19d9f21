"""How the transformer computes over rows; `remask.model.invariant` has another way."""

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 16  # bytes; the grouped kernel reads rows that begin at multiples of it


class Arithmetic:
    """Computes all rows at once.

    Attributes:
        invariant: whether the bits of a row depend on that row alone.
    """

    invariant = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` [N, K] times the transpose of `weight` [M, K], plus `bias` [M]: [N, M]."""
        return F.linear(x, weight, bias)

    def grouped(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Rows of `x` [N, K], in the order of their groups, times the transposes of `weights` [G, M, K]: [N, M].

        `ends` int32 [G], on the device, holds how many rows are in each group and in all before it. Where PyTorch has a
        kernel for it, all groups are one product, and the host does not wait.
        """
        kernel = x.is_cuda and x.dtype == torch.bfloat16
        if kernel and all(size * x.element_size() % ALIGNED == 0 for size in weights.shape[1:]):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
        return self.by_group(x, weights, ends)

    def by_group(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """`grouped` by one product of each group that has rows. The host reads `ends`."""
        out = x.new_empty((len(x), weights.shape[1]))
        start = 0
        for weight, end in zip(weights, ends.tolist(), strict=True):
            if end > start:
                out[start:end] = self.linear(x[start:end], weight)
            start = end
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        """Sigmoid of `x` [N, K]."""
        return x.sigmoid()

    def silu_(self, x: Tensor) -> Tensor:
        """SiLU of `x` [N, K], a part of the columns of another tensor, in place."""
        return F.silu(x, inplace=True)

    def placed(self, x: Tensor) -> Tensor:
        """`x`, or a copy at an address on which no result depends."""
        return x
