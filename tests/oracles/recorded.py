"""What was recorded of the originals, beside what an oracle computes."""

import pytest
import torch
from torch import Tensor

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def close(actual: Tensor, expected: Tensor, atol: float = 5e-4) -> None:
    """Float32 originals differ from float64 by up to 1.6e-4 on logits of order 10."""
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=atol)
