"""The data of a layer's rows, apart from their hidden states."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows of a stage that a layer computes.

    Attributes:
        cos: for RoPE, [N, 1, R / 2], of the model's dtype or wider (`ModelConfig.rope_float32`).
        sin: as `cos`.
        slots: int64 [W], where the K/V of the rows that are written go. For kernels [N], and -1 for none.
        written: int64 [W], those rows; None: all.
        outputs: whether their attention and FFN outputs are kept, addressed like K and V.
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    written: Tensor | None
    outputs: bool
