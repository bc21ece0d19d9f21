"""Measures of distributions: confidences of remask's own remasking rules (`remask.plan.RowMeasure`), and the divergence
of predictions, as audits, reports and tables use it.
"""

import torch
from torch import Tensor

from remask.sampling.vocabulary import WHOLE, Vocabulary

_EPSILON = 1e-10  # as in Dream's code: keeps the logarithm of 0 finite


def margin(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The probability of the best token minus that of the second, [rows]; `logprobs` [rows, V]."""
    best, second = vocabulary.top(logprobs, 2)[0].exp().unbind(dim=-1)
    return best - second


def negative_entropy(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The negative entropy in nats, so that larger is more confident, [rows]; `logprobs` [rows, V]."""
    probabilities = logprobs.exp()
    return vocabulary.sum(probabilities * (probabilities + _EPSILON).log())


def divergence(reference: Tensor, predicted: Tensor, vocabulary: Vocabulary = WHOLE) -> Tensor:
    """KL divergence of each row from `reference` to `predicted`, both logits [rows, V], in nats: float32 [rows].

    The mask token counts like any other. Results that rounding makes negative are 0; NaN in either input stays.
    """
    reference_logprobs, logprobs = (vocabulary.log_softmax(logits.float()) for logits in (reference, predicted))
    probabilities = reference_logprobs.exp()
    terms = torch.where(probabilities == 0, 0.0, probabilities * (reference_logprobs - logprobs))
    return vocabulary.sum(terms).clamp(min=0)
