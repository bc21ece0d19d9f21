"""The entropy of a row, on the device."""

import torch
from torch import Tensor

from remask.sampling.vocabulary import Vocabulary


def entropy(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The entropy of each row in nats, [rows]; `logprobs` [rows, V]."""
    chances = logprobs.exp()
    return -vocabulary.sum(torch.where(chances > 0, chances * logprobs, 0.0))
