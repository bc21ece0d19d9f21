"""The predicted rows of one request among the logits of a pass, and the device side of readers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.plan.hooks import RowMeasure
from remask.sampling.filters import Draws
from remask.sampling.uniform_score import NoisyRows
from remask.sampling.vocabulary import WHOLE, Vocabulary

Basis: TypeAlias = Literal["logits", "tempered", "filtered"]

NumberFunction: TypeAlias = Callable[[Tensor], Tensor]
"""Maps the tokens of rows, int64 [rows], to the numbers of a reader, float32 [width, rows]."""


class DeviceRead:
    """The device part of a reader, for the rows of one pass of one request; the base class does nothing.

    The methods are called in the order of this class. None may wait for the device, or change the object. The object is
    pickled to every rank of a parallel model. There `logits` have the columns of that rank's tokens alone, and are read
    by the methods of `vocabulary`.

    Attributes:
        bars: whether `bar` excludes tokens, so that the most probable token may not be chosen.
        filters: whether `keep` excludes tokens.
    """

    bars: ClassVar[bool] = False
    filters: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """How many numbers `measure` returns for a row."""
        return 0

    def slice_rows(self, start: int, stop: int) -> Self:  # noqa: ARG002
        """The device part for the rows from index `start` up to `stop`. All slices are read, in order."""
        return self

    def see(self, logits: Tensor, guide: Tensor | None) -> None:
        """Read the model's `logits` [rows, V], and `guide`, those of the unconditional canvas if it runs.

        Must not change or keep them, as they are changed later.
        """

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:
        """Change `logits` [rows, V] in place before anything is read of them; see `see`."""

    def measure(
        self,
        logits: Tensor,  # noqa: ARG002
        rows: "RowGroup",  # noqa: ARG002
        mask_id: int,  # noqa: ARG002
        vocabulary: Vocabulary,  # noqa: ARG002
    ) -> NumberFunction | None:
        """Return a function from tokens to the reader's numbers; None if it reads none. Must change no argument.

        `logits` [rows, V] are read by the methods of `vocabulary`.
        """
        return None

    def bar(self, choice: Tensor, vocabulary: Vocabulary) -> None:
        """Exclude tokens from the choice: lower their logits `choice` [rows, V] in place."""

    def keep(self, choice: Tensor, vocabulary: Vocabulary) -> Tensor:  # noqa: ARG002
        """Return the logits `choice` [rows, V] with -inf for improbable tokens, as a filter before `top_k` and `top_p`.

        Must change nothing in place, and keep the most probable token.
        """
        return choice

    def replace(self, tokens: Tensor) -> Tensor:
        """Return the tokens that replace the sampler's `tokens`; both float32 [rows], as all that the host reads."""
        return tokens


@dataclass(frozen=True, slots=True)
class Penalty:
    """A penalty on the logit of one token of each row, before the row is read.

    Attributes:
        tokens: a token id of each row, int64 [rows]; `Penalty.NONE` for rows without a penalty.
        size: how much the logit is lowered.
    """

    NONE: ClassVar[int] = -1

    tokens: NDArray[np.int64]
    size: float

    def apply(self, logits: Tensor, vocabulary: Vocabulary = WHOLE) -> None:
        """Lower `logits` [rows, V] in place."""
        tokens = send(self.tokens, logits.device)
        losses = torch.where(tokens == self.NONE, 0.0, self.size).to(logits.dtype)
        vocabulary.lower(logits, tokens.clamp_min(0), losses)

    def slice_rows(self, start: int, stop: int) -> "Penalty":
        """The penalty of the rows from index `start` up to `stop`."""
        return replace(self, tokens=self.tokens[start:stop])


@dataclass(frozen=True, slots=True)
class Signal:
    """The expected embedding of rows, which the next pass over their positions takes in.

    Attributes:
        temperature: temperature of the distribution of the expectation, above 0.
        slots: the slots in which it is stored, int64 [rows], set by the runner; None before that.
    """

    temperature: float
    slots: NDArray[np.int64] | None = None

    def slice_rows(self, start: int, stop: int) -> "Signal":
        """The signal of the rows from index `start` up to `stop`."""
        return self if self.slots is None else replace(self, slots=self.slots[start:stop])


@dataclass(slots=True)  # not frozen, as one is made for each request of each pass
class RowGroup:
    """The rows of one request among the logits, and how they become tokens and confidences.

    Draws in a row depend on the request's `seed`, its `step` and the row's position alone. Without `positions` rows
    are numbered from 0 on.

    The confidence is the `row_measure` of a distribution, or without one the probability of the token. The distribution
    is the softmax of the plain logits, or by `basis` of the logits after temperature ("tempered"), or after
    temperature, top-p and top-k ("filtered"). `noisy` rows of a uniform model have measures of their own. A `penalty`
    lowers logits before all of that.

    In `free` rows the mask token may be chosen like any other. The next pass takes in the predictions of rows with a
    `signal`. `guide` are the rows of the unconditional canvas for the same positions, if it runs. `reads` are the
    device parts of the request's readers.
    """

    rows: slice
    row_measure: RowMeasure | None = None
    basis: Basis = "logits"
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    step: int = 0
    positions: NDArray[np.int64] | Tensor | None = None  # a tensor once they are on the device
    guide: slice | None = None
    noisy: NoisyRows | None = None
    penalty: Penalty | None = None
    free: bool = False
    reads: Sequence[DeviceRead] = ()
    signal: Signal | None = None

    def slice_rows(self, start: int, stop: int) -> "RowGroup":
        """The rows from index `start` up to `stop` as a group of their own, with the same results.

        Its logits begin with these rows, followed by their guide rows, if any. All slices are read, in order.
        """
        count = stop - start
        return replace(
            self,
            rows=slice(0, count),
            guide=None if self.guide is None else slice(count, 2 * count),
            positions=np.arange(start, stop) if self.positions is None else self.positions[start:stop],
            noisy=None if self.noisy is None else self.noisy.slice_rows(start, stop),
            penalty=None if self.penalty is None else self.penalty.slice_rows(start, stop),
            reads=tuple(read.slice_rows(start, stop) for read in self.reads),
            signal=None if self.signal is None else self.signal.slice_rows(start, stop),
        )

    @property
    def draws(self) -> Draws:
        """The seed, step and positions that draws in these rows depend on."""
        return Draws(self.seed, self.step, self.positions)
