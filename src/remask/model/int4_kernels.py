"""Products of rows with matrices of numbers of four bits on a CPU.

Each row of a matrix has a unit, and each group of columns a step and an offset in that unit. So a part of the matrix is
unpacked to whole numbers of eight bits, in a cache, and multiplied as matrices of `int8` are: progressive quantization,
as in QServe (Lin et al., 2024, section 4.1). Sums are exact.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.model.int8_kernels import TINY, int_mm_limit, whole_rows
from remask.model.kernel_speed import MARGIN, SIDE, Kernel, average, speeds

GROUP = 32  # columns that have a step and an offset of their own
WIDTH = GROUP // 2 + 4  # bytes of a group: its codes, and step and offset in float16
TILE = 2**18  # numbers that are unpacked at a time, or up to a half more
TILE_BYTES = 5 * TILE * 3 // 2  # in float32, and in eight bits
_LARGEST = 126  # of a number in its row's unit: one less than 127, as steps and offsets are rounded
# What zero is unpacked as. The low byte of what is left without its fraction is the nearest whole number around zero.
_MIDDLE = 256.5
_TOLERANCE = 0.1  # of a product whose rows are rounded to seven bits
# PyTorch's function for tables of embeddings, whose rows our groups are; it returns float32.
_UNPACK = torch.ops.quantized.embedding_bag_4bit_unpack.default


def pack(values: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """The groups [m, K / 32 x `WIDTH`] of codes [m, K], and the unit of each row.

    The number of a code is (code - 8) x scale + zero. Codes of a group are counted from its least one, so that its
    offset is one of its numbers.
    """
    grouped = values.view(len(values), -1, GROUP)
    low, high = grouped.aminmax(dim=-1)
    first, last = (zeros + (code.float() - 8) * scales for code in (low, high))
    units = (torch.maximum(first.abs(), last.abs()).amax(dim=-1) / _LARGEST).clamp_min(TINY)
    # A group of one number may have any step.
    steps = torch.where(high > low, scales / units[:, None], 0.0)
    offsets = first / units[:, None] + _MIDDLE
    constants = torch.stack((steps, offsets), dim=-1).half().view(torch.uint8)
    codes = grouped - low[..., None]
    return torch.cat((codes[..., ::2] | (codes[..., 1::2] << 4), constants), dim=-1).flatten(1), units


def product(x: Tensor, groups: Tensor, units: Tensor, by: str) -> Tensor:
    """Rows `x` [N, K] times the transpose of a packed matrix [M, K]; of the dtype of `x`.

    With `int_mm` each row is rounded to whole numbers by a scale of its own, and has the same bits in any company.
    """
    columns = x.shape[1]
    step = -(-len(groups) // max(1, round(len(groups) * columns / TILE)))  # rows of a tile, which are all alike
    parts = torch.split(groups.view(-1, WIDTH), step * (columns // GROUP))
    if by == "float32":
        rows = x.float()
        made = [F.linear(rows, _UNPACK(part).sub_(_MIDDLE).view(-1, columns)) for part in parts]
        return torch.cat(made, dim=1).mul_(units).to(x.dtype)
    rows, scales = whole_rows(x)
    sums = torch.empty((len(groups), len(x)), dtype=torch.int32)
    tile = torch.empty((step, columns), dtype=torch.int8)
    for part, out in zip(parts, torch.split(sums, step), strict=True):
        held = tile[: len(out)]
        held.view(-1, GROUP).copy_(_UNPACK(part))
        torch._int_mm(held, rows.t(), out=out)
    return (sums.t().contiguous() * scales).mul_(units).to(x.dtype)


@cache
def int4_kernel() -> Kernel:
    """The kernel of this process. The first call measures, which takes about two tenths of a second.

    Rows stay float32 where `torch._int_mm` is slow, or where a number beyond 127 does not become its low byte, which
    no rule says.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (SIDE, SIDE), dtype=torch.uint8, generator=generator)
    constants = torch.ones((SIDE, SIDE // GROUP))
    groups, units = pack(codes, constants, constants)
    wide = Kernel("float32", speed=speeds(lambda x: product(x, groups, units, "float32")))
    x = torch.randn((1, SIDE), generator=generator)
    exact, found = (product(x, groups, units, by) for by in ("float32", "int_mm"))
    if float((found - exact).norm()) > _TOLERANCE * float(exact.norm()):
        return wide
    whole = Kernel("int_mm", int_mm_limit() < 127, speeds(lambda x: product(x, groups, units, "int_mm")))
    return wide if average(wide.speed) > MARGIN * average(whole.speed) else whole
