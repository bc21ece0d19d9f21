"""Random weights of a model's shape, for measuring speed without a checkpoint."""

from itertools import chain

import torch

from remask.models.config import ModelConfig
from remask.models.weights import Weights, empty_weights

_STD = 0.02


def dummy_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Weights drawn on `device` from a normal distribution of standard deviation 0.02. The gains of norms are one.

    One seed gives the same weights for the same shape, dtype and kind of device. Different kinds of devices draw
    different numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = empty_weights(config, dtype, device)
    layers = [(layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm) for layer in weights.layers]
    ones = {id(norm) for norm in (weights.norm, *chain.from_iterable(layers))}
    # By identity: a tied head is the embedding, and is drawn once.
    for key, tensor in {id(tensor): tensor for tensor in weights.tensors()}.items():
        if key in ones:
            tensor.fill_(1)
        else:
            tensor.normal_(0, _STD, generator=generator)
    return weights
