"""Random weights at a model's real shape, for measuring speed without a checkpoint."""

import torch

from remask.models.config import ModelConfig
from remask.models.weights import Weights, empty_weights

_STD = 0.02


def dummy_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Normal weights of standard deviation 0.02, norms one, drawn in place on `device`.

    One seed gives the same weights for the same shape, dtype and kind of device; generators of different devices
    draw different numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = empty_weights(config, dtype, device)
    norms = [weights.norm, *(norm for layer in weights.layers for norm in (layer.attn_norm, layer.ffn_norm))]
    ones = {id(norm) for norm in norms}
    # By identity, because a tied head is the embedding and is drawn once.
    for key, tensor in {id(tensor): tensor for tensor in weights.tensors()}.items():
        if key in ones:
            tensor.fill_(1)
        else:
            tensor.normal_(0, _STD, generator=generator)
    return weights
