"""The most probable token of each row, for corrections of uniform models that end once no more of them stand there."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remask.readers.base import Predicted, Reader, ReadPass
from remask.sampling.rows import DeviceRead, Measured, RowGroup
from remask.sampling.vocabulary import Vocabulary


class Proposals(Reader):
    """Gives a decoder that asks for it (`Decoder.reads_best`) the most probable token allowed at each position."""

    name = "proposals"

    def on_device(self, step: ReadPass) -> DeviceRead | None:
        """See `Reader`."""
        self._decoder = step.decoder
        return Best() if step.decoder.reads_best else None

    def read(self, found: Predicted, numbers: NDArray[np.float32]) -> None:
        """See `Reader`."""
        self._decoder.note(found.positions, numbers[0].astype(np.int64))


class Best(DeviceRead):
    """The most probable allowed token of each row."""

    @property
    def width(self) -> int:
        """See `DeviceRead`."""
        return 1

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Measured:
        """See `DeviceRead`."""
        allowed, noisy = logits.clone(), rows.noisy
        vocabulary.bar(allowed, [mask_id])
        if noisy is not None and noisy.banned and noisy.banned_rows:
            vocabulary.bar(allowed[: noisy.banned_rows], noisy.banned)
        found = vocabulary.best(allowed)[1].float()
        return lambda tokens: found[None]  # noqa: ARG005
