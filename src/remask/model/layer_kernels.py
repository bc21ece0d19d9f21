"""The protocol of kernels for the operations between the matrix products of a layer."""

from typing import Protocol

from torch import Tensor

from remask.model.weights import LayerWeights


class LayerKernels(Protocol):
    """The operations between products, each in one launch for any batch."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of the rows of `x` [N, D] with `weight` [D]. Does not change `x`."""
        ...

    def add(
        self, h: Tensor, new: Tensor, weight: Tensor | None, kept: Tensor | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """Add `new` [N, D] to `h` [N, D] in place. Returns the RMS norm of the sum with `weight`, or `h` without one.

        Rows of `new` are also copied to their `slots`, int64 [N], of `kept` [any, D]; -1 stands for none.
        """
        ...

    def heads(
        self, qkv: Tensor, w: LayerWeights, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor
    ) -> Tensor:
        """The queries after norm and RoPE, [N, heads, Dh], of the fused projection `qkv` [N, (heads + 2 groups) Dh].

        K after norm and RoPE, and V, are written to the rows' `slots`, int64 [N], of `k` and `v` [any, groups, Dh]; -1
        stands for none. `cos` and `sin` are [N, 1, R / 2].
        """
        ...

    def gate(self, x: Tensor) -> Tensor:
        """silu(gate) * up, [N, F], of `x` [N, 2 F], which has the gates first."""
        ...
