"""Holes that must be filled: tokens that fill up a hole are not chosen where the request asks for a least length."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.plan.canvas import Canvas, Template
from remask.plan.spans import Mask
from remask.readers.base import Reader, ReadPass
from remask.sampling.rows import DeviceRead
from remask.sampling.vocabulary import WHOLE, Vocabulary


class Padding(Reader):
    """Bars the padding of the template from places that must not hold it."""

    name = "padding"
    drafted = True

    def __init__(self, tokens: tuple[int, ...], barred: Mask) -> None:
        """`barred` [T] are the positions that must hold none of `tokens`."""
        self._tokens, self._barred = tokens, barred

    @classmethod
    def of(cls, response: Template, canvas: Canvas) -> "Padding | None":
        """The reader of a response; None where all of its places may hold padding."""
        if not response.unpadded.any():
            return None
        barred = np.zeros(len(canvas), dtype=np.bool_)
        barred[canvas.prompt : canvas.end] = response.unpadded
        return cls(response.padding, barred)

    def on_device(self, step: ReadPass) -> DeviceRead | None:
        """See `Reader`."""
        rows = self._barred[step.positions]
        return Barred(self._tokens, rows) if rows.any() else None


@dataclass(frozen=True, slots=True)
class Barred(DeviceRead):
    """Tokens that are not chosen in some rows. They count in the probabilities, as the mask token does.

    Attributes:
        tokens: the token ids.
        rows: in which rows, bool [rows].
    """

    tokens: tuple[int, ...]
    rows: NDArray[np.bool_]
    bars = True

    def piece(self, start: int, stop: int) -> "Barred":
        """See `DeviceRead`."""
        return replace(self, rows=self.rows[start:stop])

    def bar(self, choice: Tensor, vocabulary: Vocabulary = WHOLE) -> None:
        """See `DeviceRead`: their logits are minus infinity."""
        losses = torch.where(send(self.rows, choice.device), torch.inf, 0.0).to(choice.dtype)
        for token in self.tokens:
            vocabulary.lower(choice, torch.full_like(losses, token, dtype=torch.int64), losses)
