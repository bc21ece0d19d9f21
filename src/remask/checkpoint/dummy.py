"""Random weights of a model's shape, for measuring speed without a checkpoint."""

import torch
from torch import Tensor

from remask.families.family import Slot
from remask.model.config import ModelConfig
from remask.model.quantised import QuantisedMatrix
from remask.model.quantization_names import Quantization
from remask.model.ranks import Shard
from remask.model.weights import WHOLE, Weights, empty_weights

_STD = 0.02
_NORMS = ("norm", "attn_norm", "ffn_norm", "q_norm", "k_norm")


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    shard: Shard = WHOLE,
    quantization: Quantization | None = None,
) -> Weights:
    """Weights drawn on `device` from a normal distribution of standard deviation 0.02. The gains of norms are one.

    One seed gives the same weights for the same shape, dtype and kind of device; different kinds of devices draw
    different numbers. A `shard` holds its part of these weights, and matrices may be quantised: each tensor that is cut
    or quantised is drawn as a whole before, and the others in their places.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = empty_weights(config, dtype, device, shard, quantization)
    shapes = empty_weights(config, dtype, torch.device("meta")).named()
    for (field, layer, shape), (_, _, held) in zip(shapes, weights.named(), strict=True):
        if shard.size == 1 and not isinstance(held, QuantisedMatrix):
            _draw(field, held, generator)
            continue
        drawn = torch.empty_like(shape, device=device)
        _draw(field, drawn, generator)
        for piece in Slot(field, tuple(shape.shape), field, layer).pieces(config, shard):
            piece.fill(weights, drawn if piece.part is None else drawn[piece.part])
    return weights


def _draw(field: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill `tensor`."""
    if field in _NORMS:
        tensor.fill_(1)
    else:
        tensor.normal_(0, _STD, generator=generator)
