"""Choosing positions on the device, for many requests at once; `remask.remasking.select` does it on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.remasking.select import Ranked
from remask.sampling.decoder import Positions, Transfers


@dataclass(frozen=True, slots=True)
class Candidates:
    """Predicted positions of one request, of which some are transferred.

    Attributes:
        rows: how many were predicted.
        chosen: how they are chosen; positions that are known must be among `positions`. None: by the host.
        positions: the predicted positions, ascending, int64 [rows].
        block: where positions may be transferred.
        places: for each canvas that gets the tokens, the places of its positions in the token buffer, int64 [T].
    """

    chosen: Transfers | None
    positions: Positions
    block: range
    places: Sequence[NDArray[np.int64]]

    @property
    def rows(self) -> int:
        """Predicted positions."""
        return len(self.positions)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which of the positions are known to be transferred, bool [rows]."""
        if self.chosen is None or isinstance(self.chosen, Ranked):
            return np.zeros(self.rows, dtype=np.bool_)
        return np.isin(self.positions, self.chosen)

    @property
    def ranked(self) -> NDArray[np.bool_]:
        """Which of the positions are ranked where they are noisy, bool [rows]."""
        if not isinstance(self.chosen, Ranked):
            return np.zeros(self.rows, dtype=np.bool_)
        return (self.positions >= self.block.start) & (self.positions < self.block.stop)


@dataclass(frozen=True, slots=True)
class Choice:
    """How positions of R rows are chosen, for N requests one after the other, and where W tokens are written.

    Attributes:
        owner: request of each row, int64 [R].
        first: the first row of each request, int64 [N].
        known: rows that are chosen in any case, bool [R].
        ranked: rows that are ranked where they are noisy, bool [R].
        least, threshold, factor, changes: the fields of `Ranked`, int64, float64 and bool [N]; a factor of -1 is none.
        place: place of each row's position in the token buffer, int64 [R].
        rows: the row of each token that is written, int64 [W].
        targets: where it is put, int64 [W].
    """

    owner: Tensor
    first: Tensor
    known: Tensor
    ranked: Tensor
    least: Tensor
    threshold: Tensor
    factor: Tensor
    changes: Tensor
    place: Tensor
    rows: Tensor
    targets: Tensor

    @classmethod
    def of(cls, requests: Sequence[Candidates], device: torch.device) -> "Choice":
        """The choice of all `requests`, in one copy."""
        counts = [each.rows for each in requests]
        rules = [each.chosen if isinstance(each.chosen, Ranked) else Ranked(0) for each in requests]
        first = np.cumsum([0, *counts[:-1]])
        targets = [(start, each, places) for start, each in zip(first, requests, strict=True) for places in each.places]
        parts = (
            np.repeat(np.arange(len(requests)), counts),
            first,
            np.concatenate([each.known for each in requests]),
            np.concatenate([each.ranked for each in requests]),
            [rule.least for rule in rules],
            np.array([rule.threshold for rule in rules]).view(np.int64),
            np.array([-1.0 if rule.factor is None else rule.factor for rule in rules]).view(np.int64),
            [rule.changes for rule in rules],
            np.concatenate([each.places[0][each.positions] for each in requests]),
            np.concatenate([np.arange(start, start + each.rows) for start, each, _ in targets]),
            np.concatenate([places[each.positions] for _, each, places in targets]),
        )
        arrays = [np.asarray(part, dtype=np.int64) for part in parts]
        owner, start, known, ranked, least, threshold, factor, changes, *places = torch.split(
            send(np.concatenate(arrays), device), [len(array) for array in arrays]
        )
        doubles = threshold.view(torch.float64), factor.view(torch.float64)
        return cls(owner, start, known.bool(), ranked.bool(), least, *doubles, changes.bool(), *places)

    def choose(self, confidence: Tensor, noisy: Tensor, new: Tensor) -> Tensor:
        """Which rows are chosen, bool [R], of `confidence` float32 [R], in no order but theirs. Changes no argument.

        `noisy` [R] says which rows are noisy, `new` [R] which of them predict another token than the one they have.

        Equal confidences are taken from the left, as by the host. Nothing waits for the device.
        """
        candidate = noisy & self.ranked
        # Stable sorts: first by confidence, then by request, candidates before the others.
        order = (-confidence).argsort(stable=True)
        order = order[(2 * self.owner + ~candidate)[order].argsort(stable=True)]
        every = torch.arange(len(order), device=order.device)
        rank = torch.empty_like(order).index_copy_(0, order, every - self.first[self.owner[order]])
        factor = self.factor[self.owner]
        limit = torch.where(factor >= 0, 1 - factor / (rank + 2), self.threshold[self.owner])
        candidates, passed = (
            torch.zeros_like(self.first).index_add_(0, self.owner, rows.long())
            for rows in (candidate, candidate & (confidence.double() >= limit))
        )
        count = torch.maximum(self.least, passed)
        count = torch.where((self.factor >= 0) & (count >= candidates - 1), candidates, count)
        taken = candidate & (rank < count[self.owner])
        return self.known | (taken & (~self.changes[self.owner] | (new & (confidence > 0))))
