"""Entropies of the predicted distributions, for cache policies that weigh positions by them (`Traits.reads`)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.readers.base import Predicted, Reader, ReadPass
from remask.sampling.rows import DeviceRead, Measured, RowGroup
from remask.sampling.vocabulary import Vocabulary


class Entropy(Reader):
    """Gives the policy's next view the entropies of the last pass (`LastPass.entropies`)."""

    name = "entropy"

    def on_device(self, step: ReadPass) -> DeviceRead:  # noqa: ARG002
        """See `Reader`."""
        return Entropies()

    def read(self, found: Predicted, numbers: NDArray[np.float32]) -> None:
        """See `Reader`."""
        found.entropies = numbers[0]


class Entropies(DeviceRead):
    """The entropy of each row in nats, of the logits as they are: the mask token counts."""

    @property
    def width(self) -> int:
        """See `DeviceRead`."""
        return 1

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Measured:  # noqa: ARG002
        """See `DeviceRead`."""
        logs = vocabulary.log_softmax(logits)
        chances = logs.exp()
        found = -vocabulary.sum(torch.where(chances > 0, chances * logs, 0.0)).float()
        return lambda tokens: found[None]  # noqa: ARG005
