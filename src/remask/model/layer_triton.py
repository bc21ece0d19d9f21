"""The operations between the matrix products of a layer, as Triton kernels of one launch each.

Importing this module needs Triton. Numbers are computed in float32, and rounded where they are stored.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from remask.model.config import ModelConfig
from remask.model.weights import LayerWeights

INTERPRETED: bool = triton.knobs.runtime.interpret  # kernels run in Triton's interpreter, on any device
# Options of every kernel: a product and a sum are one operation if the device has one.
OPTIONS: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})
BLOCK = 1024  # numbers that a program of an elementwise kernel computes


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch `kernel` on the device of the first argument, a tensor; its `EMULATED` is whether it is interpreted."""
    with torch.cuda.device(arguments[0].device) if arguments[0].is_cuda else nullcontext():
        kernel[grid](*arguments, EMULATED=INTERPRETED, **constants, **OPTIONS)


@triton.jit
def round_to(x, dtype: tl.constexpr, EMULATED: tl.constexpr):
    """`x`, float32, rounded to the nearest number of `dtype`. The interpreter alone would truncate to bfloat16."""
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


class TritonLayer:
    """The operations between products, each in one launch for any batch, of a model or a rank's part of one."""

    def __init__(self, config: ModelConfig) -> None:
        self.query_heads = config.heads
        self.head_dim = config.head_dim
        self.eps = config.norm_eps
        self._centred = config.norm == "layer"
        self._heads_options = heads_options(config)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of the rows of `x` [N, D] with `weight` [D]."""
        return self._launch(x.contiguous(), None, weight, None, None)

    def add(
        self, h: Tensor, x: Tensor, weight: Tensor | None, outputs: Tensor | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """Add `x` [N, D] to `h` [N, D] in place. Returns the norm of the sum with `weight`, or `h` if there is none.

        With `outputs` [any, D], also copies each row of `x` to its slot in `slots`, int64 [N]; rows with slot -1 are
        left.
        """
        return self._launch(h, x.contiguous(), weight, outputs, slots)

    def place_heads(
        self, qkv: Tensor, w: LayerWeights, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor
    ) -> Tensor:
        """Write K after norm and RoPE, and V, and return the queries after norm and RoPE, [N, heads, Dh].

        `qkv` [N, (heads + 2 groups) Dh] is the fused projection. K and V of a row go to its slot in `slots`, int64 [N],
        of `k` and `v` [any, groups, Dh]; rows with slot -1 are not written. `cos` and `sin` are [N, 1, R / 2].
        """
        q = qkv.new_empty((len(qkv), self.query_heads, self.head_dim))
        if len(qkv):
            launch(
                _heads, (len(qkv),),
                qkv, qkv if w.q_norm is None else w.q_norm, qkv if w.k_norm is None else w.k_norm, cos, sin, slots,
                q, k, v, self.eps, **self._heads_options,
            )  # fmt: skip
        return q

    def gate(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """silu(gate) * up, or gelu(gate) * up, [N, F], of `x` [N, 2 F], whose first half is the gate."""
        out = x.new_empty((len(x), x.shape[1] // 2))
        if out.numel():
            grid = (triton.cdiv(out.numel(), BLOCK),)
            launch(_gate, grid, x, out, out.numel(), out.shape[1], BLOCK=BLOCK, GELU=gelu)
        return out

    def _launch(
        self, h: Tensor, x: Tensor | None, weight: Tensor | None, outputs: Tensor | None, slots: Tensor | None
    ) -> Tensor:
        """Do what `add` says; without `x` only the norm is computed. The kernel is not launched for 0 rows."""
        out = h if weight is None else torch.empty_like(h)
        if len(h):
            # `h` stands for arguments that the kernel does not read: there is no null pointer.
            launch(
                _sum_and_norm, (len(h),),
                h, h if x is None else x, h if weight is None else weight, out,
                h if outputs is None else outputs, h if slots is None else slots, self.eps,
                **sum_options(h.shape[1], add=x is not None, norm=weight is not None, store=outputs is not None,
                              centred=self._centred),
            )  # fmt: skip
        return out


def heads_options(config: ModelConfig) -> dict[str, Any]:
    """The constants of `_heads`."""
    return {
        "HEADS": config.heads,
        "GROUPS": config.kv_heads,
        "DIM": config.head_dim,
        "HALF": (config.rotary_dim or config.head_dim) // 2,
        "TALL": triton.next_power_of_2(config.heads),
        "LOW": triton.next_power_of_2(config.kv_heads),
        "WIDTH": triton.next_power_of_2(config.head_dim),
        "NORMED": config.qk_norm is not None,
        "WHOLE": config.qk_norm == "whole",
    }


def sum_options(size: int, *, add: bool, norm: bool, store: bool, centred: bool = False) -> dict[str, Any]:
    """The constants of `_sum_and_norm` for rows of `size` channels; with `centred` the norm is LayerNorm."""
    width = triton.next_power_of_2(size)
    return {"SIZE": size, "WIDTH": width, "ADD": add, "NORM": norm, "STORE": store, "CENTRED": centred}


@triton.jit
def _sum_and_norm(
    h, addend, weight, out, outputs, slots, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, STORE: tl.constexpr,
    CENTRED: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """One row: stores the sum in `h` (`ADD`), its norm in `out` (`NORM`), and the addend in `outputs` (`STORE`)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    live = channel < SIZE
    x = tl.load(h + row * SIZE + channel, mask=live, other=0.0).to(tl.float32)
    if ADD:
        term = tl.load(addend + row * SIZE + channel, mask=live, other=0.0)
        total = round_to(x + term.to(tl.float32), h.dtype.element_ty, EMULATED)
        tl.store(h + row * SIZE + channel, total, mask=live)
        x = total.to(tl.float32)
        if STORE:
            slot = tl.load(slots + row)
            if slot >= 0:
                tl.store(outputs + slot * SIZE + channel, term, mask=live)
    if NORM:
        if CENTRED:
            x = tl.where(live, x - tl.sum(x, 0) / SIZE, 0.0)
        scale = 1 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
        w = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
        tl.store(out + row * SIZE + channel, round_to(x * scale * w, out.dtype.element_ty, EMULATED), mask=live)


@triton.jit
def _norm_and_rotate(
    x, weight, cos, sin, eps,
    COUNT: tl.constexpr, TALL: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr, WHOLE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """`COUNT` heads at `x` after norm and RoPE, float32 [TALL, WIDTH]; `cos` and `sin` point to those of the row."""
    head, channel = tl.arange(0, TALL), tl.arange(0, WIDTH)
    # Channel c < HALF is paired with channel c + HALF. Channels from 2 HALF on are not rotated.
    rotary = channel < 2 * HALF
    partner = tl.where(channel < HALF, channel + HALF, tl.where(rotary, channel - HALF, channel))
    live = (head < COUNT)[:, None] & (channel < DIM)[None, :]
    offset, partner_offset = head[:, None] * DIM + channel[None, :], head[:, None] * DIM + partner[None, :]
    values = tl.load(x + offset, mask=live, other=0.0)
    partners = tl.load(x + partner_offset, mask=live, other=0.0)
    dtype: tl.constexpr = values.dtype
    values, partners = values.to(tl.float32), partners.to(tl.float32)
    if NORMED:
        squares = tl.sum(values * values, 1)
        if WHOLE:
            scale = tl.zeros((TALL,), tl.float32) + 1 / tl.sqrt(tl.sum(squares, 0) / (COUNT * DIM) + eps)
            w = tl.load(weight + offset, mask=live, other=0.0)
            w_partner = tl.load(weight + partner_offset, mask=live, other=0.0)
        else:
            scale = 1 / tl.sqrt(squares / DIM + eps)
            wide = (channel < DIM)[None, :]
            w = tl.load(weight + channel[None, :], mask=wide, other=0.0)
            w_partner = tl.load(weight + partner[None, :], mask=wide, other=0.0)
        values = round_to(values * scale[:, None] * w.to(tl.float32), dtype, EMULATED).to(tl.float32)
        partners = round_to(partners * scale[:, None] * w_partner.to(tl.float32), dtype, EMULATED).to(tl.float32)
    angle = tl.where(channel < HALF, channel, channel - HALF)
    c = tl.load(cos + angle, mask=rotary, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=rotary, other=0.0).to(tl.float32)
    return values * c[None, :] + partners * tl.where(channel < HALF, -s, s)[None, :]


@triton.jit
def _heads(
    qkv, q_norm, k_norm, cos, sin, slots, q, k, v, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, TALL: tl.constexpr,
    LOW: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr, WHOLE: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """One row: stores its queries, and its K and V if it has a slot."""
    row = tl.program_id(0).to(tl.int64)
    x = qkv + row * (HEADS + 2 * GROUPS) * DIM
    cos, sin = cos + row * HALF, sin + row * HALF
    channel, head, group = tl.arange(0, WIDTH), tl.arange(0, TALL), tl.arange(0, LOW)
    wide = (channel < DIM)[None, :]
    Q = _norm_and_rotate(x, q_norm, cos, sin, eps, HEADS, TALL, DIM, WIDTH, HALF, NORMED, WHOLE, EMULATED)
    q_offset = head[:, None] * DIM + channel[None, :]
    live_q = (head < HEADS)[:, None] & wide
    tl.store(q + row * HEADS * DIM + q_offset, round_to(Q, q.dtype.element_ty, EMULATED), mask=live_q)
    slot = tl.load(slots + row)
    if slot >= 0:
        K = _norm_and_rotate(
            x + HEADS * DIM, k_norm, cos, sin, eps, GROUPS, LOW, DIM, WIDTH, HALF, NORMED, WHOLE, EMULATED
        )
        offset = group[:, None] * DIM + channel[None, :]
        live = (group < GROUPS)[:, None] & wide
        V = tl.load(x + (HEADS + GROUPS) * DIM + offset, mask=live, other=0.0)
        tl.store(k + slot * GROUPS * DIM + offset, round_to(K, k.dtype.element_ty, EMULATED), mask=live)
        tl.store(v + slot * GROUPS * DIM + offset, V, mask=live)


@triton.jit
def _gate(x, out, total, SIZE, BLOCK: tl.constexpr, GELU: tl.constexpr, EMULATED: tl.constexpr):
    """`BLOCK` numbers of the output, of `total` in rows of `SIZE`."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = offset < total
    gate_offset = offset // SIZE * 2 * SIZE + offset % SIZE
    gate = tl.load(x + gate_offset, mask=live, other=0.0)
    up = tl.load(x + gate_offset + SIZE, mask=live, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate.dtype
    gate = gate.to(tl.float32)
    gate = gate * 0.5 * (1 + tl.erf(gate * 0.7071067811865476)) if GELU else gate / (1 + tl.exp(-gate))
    gate = round_to(gate, dtype, EMULATED).to(tl.float32)
    tl.store(out + offset, round_to(gate * up, out.dtype.element_ty, EMULATED), mask=live)
