"""The measures of remask's own remasking rules, on the device (`remask.plan.RowMeasure`)."""

from torch import Tensor

from remask.sampling.vocabulary import Vocabulary


def margin(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """How much more probable the best token is than the second, [rows]; `logprobs` [rows, V]."""
    first, second = vocabulary.top(logprobs, 2)[0].exp().unbind(dim=-1)
    return first - second


def negative_entropy(logprobs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The entropy in nats, negative so that larger is more confident, [rows]; `logprobs` [rows, V]."""
    probabilities = logprobs.exp()
    return vocabulary.sum(probabilities * (probabilities + 1e-10).log())
