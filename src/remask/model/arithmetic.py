"""Products and elementwise functions of rows, which `remask.model.invariant` overrides; and RoPE."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.model.config import Activation, ModelConfig

ALIGNED = 16  # bytes; the grouped kernel needs rows that begin at multiples of it


class Arithmetic:
    """Computes all rows of a pass at once.

    Attributes:
        invariant: whether the bits of a row depend on that row alone.
    """

    invariant = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` [N, K] times the transpose of `weight` [M, K], plus `bias` [M]: [N, M]."""
        return F.linear(x, weight, bias)

    def grouped_linear(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Rows of `x` [N, K], sorted by group, times the transposes of `weights` [G, M, K]: [N, M].

        `ends` int32 [G], on the device, are the indices at which the groups end. If PyTorch has a kernel for it, all
        groups are one product, and the host does not wait.
        """
        has_kernel = x.is_cuda and x.dtype == torch.bfloat16
        if has_kernel and all(size * x.element_size() % ALIGNED == 0 for size in weights.shape[1:]):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
        return self.grouped_linear_loop(x, weights, ends)

    def grouped_linear_loop(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """The result of `grouped_linear`, by one product for each group that has rows. The host waits for `ends`."""
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

    def activate_(self, x: Tensor, function: Activation = "silu") -> Tensor:
        """Apply `function` to `x` [N, K] in place, and return it. `x` may be some columns of another tensor."""
        if function == "silu":
            return F.silu(x, inplace=True)
        torch.ops.aten.gelu_(x, approximate="none" if function == "gelu" else "tanh")
        return x

    def align(self, x: Tensor) -> Tensor:
        """`x`, or a copy of it if results may depend on its address."""
        return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of `x` [N, heads, Dh] with `cos`, `sin` [N, 1, R / 2]; channel j < R / 2 is paired with channel j + R / 2.

    Channels from R on are unchanged. If `cos` and `sin` have a wider dtype, RoPE is computed in it and rounded once.
    """
    if cos.dtype != x.dtype:
        return rotate(x.to(cos.dtype), cos, sin).to(x.dtype)
    rows, heads, width = x.shape
    rotary_dim = 2 * cos.shape[-1]
    halves = x[..., :rotary_dim].view(rows, heads, 2, rotary_dim // 2)
    out = halves * cos[:, :, None]
    (first, second), (out_first, out_second) = halves.unbind(2), out.unbind(2)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    out = out.view(rows, heads, rotary_dim)
    return out if rotary_dim == width else torch.cat((out, x[..., rotary_dim:]), dim=-1)


def rope(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of all positions, [max_length, 1, R / 2] each with R rotary channels.

    They are computed in float32, and rounded to `dtype` unless the model has `rope_float32`.
    """
    cos, sin = angles(config, torch.arange(config.max_length, device=device))
    rope_dtype = torch.promote_types(dtype, torch.float32) if config.rope_float32 else dtype
    gain = 1.0 if config.rope_scaling is None else config.rope_scaling.gain
    return (cos * gain).to(rope_dtype), (sin * gain).to(rope_dtype)


def query_scales(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The factors of queries after RoPE at each position, [max_length, 1, 1]. Returns None if all are 1."""
    scaling = config.rope_scaling
    if scaling is None or not scaling.growth:
        return None
    multiples = torch.arange(config.max_length, device=device) // scaling.length
    return (1 + scaling.growth * multiples.float().log1p()).to(dtype)[:, None, None]


def angles(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE's angles at `positions` [N], float32 [N, 1, R / 2] each with R rotary channels."""
    radians = positions.float()[:, None] * frequencies(config, positions.device)
    return radians.cos()[:, None], radians.sin()[:, None]


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """The angle in radians between consecutive positions of each pair of channels, float32 [R / 2].

    Scaled as by `ROPE_INIT_FUNCTIONS` of transformers: Chen et al. 2023 ("linear"), YaRN (arXiv 2309.00071), Llama 3.1,
    Gemma 4 ("proportional").
    """
    rotary_dim, base, scaling = config.rotary_dim or config.head_dim, config.rope_theta, config.rope_scaling
    pairs = torch.arange(rotary_dim // 2, device=device)
    unscaled = 1.0 / (base ** (2 * pairs.float() / rotary_dim))
    if scaling is None:
        return unscaled
    if scaling.kind == "proportional":
        return torch.where(pairs < int(scaling.share * rotary_dim // 2), unscaled / scaling.factor, 0.0)
    share = torch.zeros_like(unscaled)  # the share of each frequency that is not slowed
    if scaling.kind == "llama3":
        share = (unscaled * scaling.length / math.tau - scaling.slow) / (scaling.fast - scaling.slow)
    elif scaling.kind == "yarn":
        low, high = (
            rotary_dim * math.log(scaling.length / (turns * math.tau)) / (2 * math.log(base))
            for turns in (scaling.fast, scaling.slow)
        )
        if scaling.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        share = 1 - (pairs - low) / ((high - low) or 1e-3)  # `or`: no division by zero, as in transformers
    share = share.clamp(0, 1)
    return unscaled * share + unscaled / scaling.factor * (1 - share)
