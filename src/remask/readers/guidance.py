"""Classifier-free guidance: logits move from the unconditional ones to the conditional ones, and beyond by a scale."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import PlanError
from remask.machine.transfers import send
from remask.model.ranks import RankLocal
from remask.readers.base import Reader, ReadPass
from remask.sampling.decoder import Predictions
from remask.sampling.rows import DeviceRead
from remask.sampling.vocabulary import Vocabulary


class Residual(RankLocal):
    """The guidance of a pass, for steps without an unconditional canvas: conditional minus unconditional logits.

    Attributes:
        logits: [rows, V], on every rank the columns of its tokens; None until the pass is scored.
    """

    logits: Tensor | None = None

    def add(self, conditional: Tensor, unconditional: Tensor) -> None:
        """Append the guidance of further rows of the pass. Both arguments are [rows, V], and stay as they are."""
        difference = conditional - unconditional
        self.logits = difference if self.logits is None else torch.cat([self.logits, difference])

    def at(self, rows: NDArray[np.int64]) -> Tensor:
        """The guidance of `rows` int64 [n], as [n, V]."""
        assert self.logits is not None
        return self.logits[send(rows, self.logits.device)]


@dataclass(slots=True)
class Guidance(Reader):
    """Guides the logits of a request that runs two canvases.

    A cache policy may run a step without the unconditional canvas (`CachePolicy.guides`). Such a step reuses the
    guidance that the last step with both canvases had at the same positions.
    """

    scale: float
    _positions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of `_residual`
    _residual: Residual | None = None
    _pending: Residual | None = None  # of the pass that runs, if the next step reads it

    name = "guidance"

    def admit(self, read_pass: ReadPass) -> None:
        if not read_pass.is_guided and self._residual is None:
            raise PlanError("the unconditional canvas is left out before any step has run it, so there is no guidance")

    def on_device(self, read_pass: ReadPass) -> DeviceRead:
        if read_pass.is_guided:
            self._pending = None if read_pass.guides_next else Residual()
            return PassGuidance(self.scale, self._pending)
        assert self._residual is not None
        return StoredGuidance(self.scale, self._residual, np.searchsorted(self._positions, read_pass.positions))

    def read(self, predictions: Predictions, numbers: NDArray[np.float32]) -> None:  # noqa: ARG002
        if self._pending is not None:
            self._positions = predictions.positions
            self._residual, self._pending = self._pending, None


@dataclass(frozen=True, slots=True)
class PassGuidance(DeviceRead):
    """Guidance by the unconditional canvas of the same pass. Stored in `residual` for later steps, if any."""

    scale: float
    residual: Residual | None

    def see(self, logits: Tensor, guide: Tensor | None) -> None:
        if self.residual is not None and guide is not None:
            self.residual.add(logits, guide)

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        if guide is not None:
            torch.lerp(guide, logits, self.scale + 1, out=logits)


@dataclass(frozen=True, slots=True)
class StoredGuidance(DeviceRead):
    """Guidance of an earlier pass: `rows` of its `residual`, int64 [rows]."""

    scale: float
    residual: Residual
    rows: NDArray[np.int64]

    def slice_rows(self, start: int, stop: int) -> "StoredGuidance":
        return replace(self, rows=self.rows[start:stop])

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        logits.add_(self.residual.at(self.rows), alpha=self.scale)
