"""How far predictions move: the one definition of divergence that audits, reports and tables share."""

import torch
from torch import Tensor

from remask.sampling.vocabulary import WHOLE, Vocabulary


def divergence(reference: Tensor, predicted: Tensor, vocabulary: Vocabulary = WHOLE) -> Tensor:
    """KL divergence of each row from `reference` to `predicted`, both logits [rows, V], in nats: float32 [rows].

    Of a step it is the mean surprise, beyond its own, with which the exact distribution meets the other one. The mask
    token counts like any other. Rounding that would make it negative is cut off; NaN in either stays.
    """
    exact, other = (vocabulary.log_softmax(logits.float()) for logits in (reference, predicted))
    chances = exact.exp()
    return vocabulary.sum(torch.where(chances == 0, 0.0, chances * (exact - other))).clamp(min=0)
