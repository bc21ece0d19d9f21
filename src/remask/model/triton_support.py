"""What Triton kernels share. Importing this module needs Triton."""

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on any device."""

OPTIONS: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})
"""What every kernel is compiled with: products and sums are one operation where the device has one."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch `kernel` on the device of the first argument, a tensor, and say whether it is `EMULATED`."""
    with torch.cuda.device(arguments[0].device) if arguments[0].is_cuda else nullcontext():
        kernel[grid](*arguments, EMULATED=INTERPRETED, **constants, **OPTIONS)


@triton.jit
def rounded(x, dtype: tl.constexpr, EMULATED: tl.constexpr):
    """`x`, float32, to the nearest of `dtype`. The interpreter cuts digits off where bfloat16 has none for them."""
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)
