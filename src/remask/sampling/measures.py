"""Measures of distributions: those of remask's own remasking rules (`remask.plan.RowMeasure`), and how far predictions
move, the one definition of divergence that audits, reports and tables share.
"""

import torch
from torch import Tensor

from remask.sampling.vocabulary import WHOLE, Vocabulary


def margin(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """How much more probable the best token is than the second, [rows]; `logprobs` [rows, V]."""
    first, second = vocabulary.top(logprobs, 2)[0].exp().unbind(dim=-1)
    return first - second


def negative_entropy(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The entropy in nats, negative so that larger is more confident, [rows]; `logprobs` [rows, V]."""
    probabilities = logprobs.exp()
    return vocabulary.sum(probabilities * (probabilities + 1e-10).log())


def divergence(reference: Tensor, predicted: Tensor, vocabulary: Vocabulary = WHOLE) -> Tensor:
    """KL divergence of each row from `reference` to `predicted`, both logits [rows, V], in nats: float32 [rows].

    Of a step it is the mean surprise, beyond its own, with which the exact distribution meets the other one. The mask
    token counts like any other. Rounding that would make it negative is cut off; NaN in either stays.
    """
    exact, other = (vocabulary.log_softmax(logits.float()) for logits in (reference, predicted))
    chances = exact.exp()
    return vocabulary.sum(torch.where(chances == 0, 0.0, chances * (exact - other))).clamp(min=0)
