"""The entropy of a row, on the device."""

import torch
from torch import Tensor

from remask.sampling.vocabulary import Vocabulary


def entropy(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The entropy of each row of `logprobs` [rows, V] in nats, float32 [rows]."""
    probs = logprobs.exp()
    return -vocabulary.sum(torch.where(probs > 0, probs * logprobs, 0.0))
