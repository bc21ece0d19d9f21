"""What the device computes of each predicted row."""

from torch import Tensor

from remask.sampling.vocabulary import Vocabulary


def collision(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """How probable it is that two draws give the same token, [rows]; `logprobs` [rows, V]."""
    return vocabulary.sum((2 * logprobs).exp())
