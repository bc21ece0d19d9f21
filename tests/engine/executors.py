"""Every way of computing attention, for tests that hold for all of them."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from remask.model.attention import Attention, NumpyAttention
from remask.model.attention_torch import TorchAttention

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton")


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
