"""How the transformer computes over rows, for which `remask.model.invariant` has another way; and RoPE."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.model.config import Activation, ModelConfig

ALIGNED = 16  # bytes; the grouped kernel reads rows that begin at multiples of it


class Arithmetic:
    """Computes all rows at once.

    Attributes:
        invariant: whether the bits of a row depend on that row alone.
    """

    invariant = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` [N, K] times the transpose of `weight` [M, K], plus `bias` [M]: [N, M]."""
        return F.linear(x, weight, bias)

    def grouped(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Rows of `x` [N, K], in the order of their groups, times the transposes of `weights` [G, M, K]: [N, M].

        `ends` int32 [G], on the device, holds how many rows are in each group and in all before it. Where PyTorch has a
        kernel for it, all groups are one product, and the host does not wait.
        """
        kernel = x.is_cuda and x.dtype == torch.bfloat16
        if kernel and all(size * x.element_size() % ALIGNED == 0 for size in weights.shape[1:]):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
        return self.by_group(x, weights, ends)

    def by_group(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """`grouped` by one product of each group that has rows. The host reads `ends`."""
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

    def activate_(self, x: Tensor, of: Activation = "silu") -> Tensor:
        """The function `of` `x` [N, K], a part of the columns of another tensor, in place."""
        if of == "silu":
            return F.silu(x, inplace=True)
        torch.ops.aten.gelu_(x, approximate="none" if of == "gelu" else "tanh")
        return x

    def placed(self, x: Tensor) -> Tensor:
        """`x`, or a copy at an address on which no result depends."""
        return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of `x` [N, heads, Dh] with `cos`, `sin` [N, 1, R / 2]; channel j < R / 2 is paired with channel j + R / 2.

    Channels from R on stay as they are. Where `cos` and `sin` are of a wider dtype, it is computed in that one and
    rounded once.
    """
    if cos.dtype != x.dtype:
        return rotate(x.to(cos.dtype), cos, sin).to(x.dtype)
    rows, heads, width = x.shape
    turned = 2 * cos.shape[-1]
    halves = x[..., :turned].view(rows, heads, 2, turned // 2)
    out = halves * cos[:, :, None]
    (first, second), (out_first, out_second) = halves.unbind(2), out.unbind(2)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    out = out.view(rows, heads, turned)
    return out if turned == width else torch.cat((out, x[..., turned:]), dim=-1)


def rope(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of all positions, [max_length, 1, R / 2] with R turned channels, computed in float32."""
    cos, sin = angles(config, torch.arange(config.max_length, device=device))
    dtype = torch.promote_types(dtype, torch.float32) if config.rope_float32 else dtype
    gain = 1.0 if config.rope_scaling is None else config.rope_scaling.gain
    return (cos * gain).to(dtype), (sin * gain).to(dtype)


def query_growth(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What queries are multiplied by after RoPE at each position, [max_length, 1, 1]; None where that is 1."""
    scaling = config.rope_scaling
    if scaling is None or not scaling.growth:
        return None
    rounds = torch.arange(config.max_length, device=device) // scaling.length
    return (1 + scaling.growth * rounds.float().log1p()).to(dtype)[:, None, None]


def angles(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin at `positions` [N], float32 [N, 1, R / 2] with R turned channels."""
    turns = positions.float()[:, None] * frequencies(config, positions.device)
    return turns.cos()[:, None], turns.sin()[:, None]


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """The angle by which each pair of channels is turned from one position to the next, float32 [R / 2].

    Scaled as `ROPE_INIT_FUNCTIONS` of transformers do: Chen et al. 2023 ("linear"), YaRN (arXiv 2309.00071), Llama 3.1,
    Gemma 4 ("proportional").
    """
    turned, base, scaling = config.rotary_dim or config.head_dim, config.rope_theta, config.rope_scaling
    plain = 1.0 / (base ** (torch.arange(0, turned, 2, dtype=torch.float32, device=device) / turned))
    if scaling is None:
        return plain
    if scaling.kind == "proportional":
        turning = torch.arange(turned // 2, device=device) < int(scaling.share * turned // 2)
        return torch.where(turning, plain / scaling.factor, 0.0)
    share = torch.zeros_like(plain)  # of each, that is not slowed
    if scaling.kind == "llama3":
        share = (plain * scaling.length / math.tau - scaling.slow) / (scaling.fast - scaling.slow)
    elif scaling.kind == "yarn":
        ends = [
            turned * math.log(scaling.length / (turns * math.tau)) / (2 * math.log(base))
            for turns in (scaling.fast, scaling.slow)
        ]
        first, last = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.whole else ends
        first, last = max(first, 0), min(last, turned - 1)
        share = 1 - (torch.arange(turned // 2, device=device) - first) / ((last - first) or 1e-3)
    share = share.clamp(0, 1)
    return plain * share + plain / scaling.factor * (1 - share)
