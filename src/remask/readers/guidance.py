"""Classifier-free guidance: logits move from those of the unconditional canvas towards the conditional ones, and on."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import PlanError
from remask.machine.transfers import send
from remask.model.ranks import RankLocal
from remask.readers.base import Reader, ReadPass
from remask.sampling.decoder import Predicted
from remask.sampling.rows import DeviceRead
from remask.sampling.vocabulary import Vocabulary


class Residual(RankLocal):
    """The guidance of a pass, conditional logits minus unconditional ones, for steps that run without the latter.

    Attributes:
        logits: [rows, V], once the pass is scored; on every rank those of its own tokens.
    """

    logits: Tensor | None = None

    def add(self, conditional: Tensor, unconditional: Tensor) -> None:
        """Keep the guidance of a pass, or of its next rows. Changes neither argument."""
        new = conditional - unconditional
        self.logits = new if self.logits is None else torch.cat([self.logits, new])

    def at(self, rows: NDArray[np.int64]) -> Tensor:
        """The guidance of `rows`, int64 [n]; [n, V]."""
        assert self.logits is not None
        return self.logits[send(rows, self.logits.device)]


@dataclass(slots=True)
class Guidance(Reader):
    """Guides the logits of a request that runs two canvases.

    In a step that its cache policy runs without the unconditional canvas (`CachePolicy.guides`) the guidance is that of
    the last step with both, at the same positions.
    """

    scale: float
    _positions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of `_residual`
    _residual: Residual | None = None
    _next: Residual | None = None  # of the pass that runs

    name = "guidance"

    def admit(self, step: ReadPass) -> None:
        if not step.paired and self._residual is None:
            raise PlanError("the unconditional canvas is left out before any step has run it, so there is no guidance")

    def on_device(self, step: ReadPass) -> DeviceRead:
        if step.paired:
            self._next = None if step.paired_next else Residual()
            return Guide(self.scale, self._next)
        assert self._residual is not None
        return Guided(self.scale, self._residual, np.searchsorted(self._positions, step.positions))

    def read(self, predictions: Predicted, numbers: NDArray[np.float32]) -> None:  # noqa: ARG002
        if self._next is not None:
            self._positions, self._residual, self._next = predictions.positions, self._next, None


@dataclass(frozen=True, slots=True)
class Guide(DeviceRead):
    """Guidance by the unconditional canvas of the same pass, whose `residual` later steps read."""

    scale: float
    residual: Residual | None

    def see(self, logits: Tensor, guide: Tensor | None) -> None:
        if self.residual is not None and guide is not None:
            self.residual.add(logits, guide)

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        if guide is not None:
            torch.lerp(guide, logits, self.scale + 1, out=logits)


@dataclass(frozen=True, slots=True)
class Guided(DeviceRead):
    """Guidance of an earlier pass: `rows` of its `residual`, int64 [rows]."""

    scale: float
    residual: Residual
    rows: NDArray[np.int64]

    def piece(self, start: int, stop: int) -> "Guided":
        return replace(self, rows=self.rows[start:stop])

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        logits.add_(self.residual.at(self.rows), alpha=self.scale)
