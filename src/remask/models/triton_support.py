"""What Triton kernels share. Importing this module needs Triton."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on any device."""


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """The context in which kernels are launched on the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit
def rounded(x, dtype: tl.constexpr, EMULATED: tl.constexpr):
    """`x`, float32, to the nearest of `dtype`. The interpreter cuts digits off where bfloat16 has none for them."""
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)
