"""Every way of computing attention, for tests that hold for all of them."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from remask.model.attention import Attention, NumpyAttention
from remask.model.attention_torch import TorchAttention

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton")


def _fp8_has_a_scale_a_row() -> bool:
    values, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(values, values.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


# Products of fp8 are for GPUs, which tests do without where PyTorch can.
NEEDS_FP8 = pytest.mark.skipif(
    not _fp8_has_a_scale_a_row(),
    reason="needs a PyTorch whose CPU products of fp8 take a scale for each row, as 2.13 does",
)


def _tiles(cap: float | None) -> Attention:
    return TorchAttention(cap, fused=False)


def _triton(cap: float | None) -> Attention:
    from remask.model.attention_triton import TritonAttention

    return TritonAttention(cap)


QUICK = [
    pytest.param(NumpyAttention, id="numpy"),
    pytest.param(TorchAttention, id="torch"),
    pytest.param(_tiles, id="tiles"),
]
EXECUTORS = [*QUICK, pytest.param(_triton, id="triton", marks=NEEDS_TRITON)]

Make = Callable[[float | None], Attention]
