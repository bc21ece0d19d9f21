"""Choosing positions on the device, for many requests at once; `remask.denoising.select` does it on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.denoising.select import RankRule
from remask.machine.transfers import send
from remask.sampling.decoder import Positions, Transfers

KNOWN, RANKED = 1, 2
"""How a row is chosen: in any case, or by its rank where it is noisy. 0: never."""
_BY_HOST = RankRule(0)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Predicted positions of one request, of which some are transferred.

    Attributes:
        chosen: how they are chosen; positions that are known must be among `positions`. None: by the host.
        positions: the predicted positions, ascending, int64 [rows].
        block: where positions may be transferred.
        places: for each canvas that gets the tokens, the places of its positions in the token buffer, int64 [T].
    """

    chosen: Transfers | None
    positions: Positions
    block: range
    places: Sequence[NDArray[np.int64]]

    def ways(self) -> int | NDArray[np.int64]:
        """How each of the positions is chosen, int64 [rows], or all of them."""
        if self.chosen is None or not len(self.positions):
            return 0
        if not isinstance(self.chosen, RankRule):
            return KNOWN * np.isin(self.positions, self.chosen).astype(np.int64)
        if self.block.start <= self.positions[0] and self.positions[-1] < self.block.stop:
            return RANKED
        inside = (self.positions >= self.block.start) & (self.positions < self.block.stop)
        return RANKED * inside.astype(np.int64)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """How positions of R rows are chosen, for N requests one after the other, and where their tokens are written.

    Attributes:
        rules: int64 [6, N]: the first row of each request, its rows, and the fields of `RankRule`, of which `threshold`
            and `factor` are the bits of a float64; a factor of -1 is none.
        owner: request of each row, int64 [R].
        ways: how each row is chosen, int64 [R].
        targets: the places of each row in the token buffer, int64 [canvases, R]. The first one says whether the row is
            noisy, and which token it has.
        longest: the most rows of a request.
    """

    rules: Tensor
    owner: Tensor
    ways: Tensor
    targets: Tensor
    longest: int

    @classmethod
    def of(cls, requests: Sequence[Candidates], nowhere: int, device: torch.device) -> "RowChoice":
        """The choice of all `requests`, in one copy. Rows of requests with fewer canvases are put `nowhere`."""
        counts = np.array([len(each.positions) for each in requests])
        first = counts.cumsum() - counts
        total, canvases = int(counts.sum()), max(len(each.places) for each in requests)
        owned = len(requests)
        rules = [each.chosen if isinstance(each.chosen, RankRule) else _BY_HOST for each in requests]
        numbers = np.empty(6 * owned + (2 + canvases) * total, dtype=np.int64)
        of_request = numbers[: 6 * owned].reshape(6, owned)
        owner, ways, *targets = numbers[6 * owned :].reshape(2 + canvases, total)
        of_request[0], of_request[1] = first, counts
        of_request[2] = [rule.least for rule in rules]
        of_request[3].view(np.float64)[:] = [rule.threshold for rule in rules]
        of_request[4].view(np.float64)[:] = [-1.0 if rule.factor is None else rule.factor for rule in rules]
        of_request[5] = [rule.changes for rule in rules]
        owner[:] = np.arange(owned).repeat(counts)
        for start, each in zip(first.tolist(), requests, strict=True):
            own = slice(start, start + len(each.positions))
            ways[own] = each.ways()
            for number, row in enumerate(targets):
                row[own] = each.places[number][each.positions] if number < len(each.places) else nowhere
        sent = send(numbers, device)
        by_row = sent[6 * owned :].view(2 + canvases, total)
        return cls(sent[: 6 * owned].view(6, owned), by_row[0], by_row[1], by_row[2:], int(counts.max()))

    def choose(self, confidence: Tensor, noisy: Tensor, new: Tensor) -> Tensor:
        """Which rows are chosen, bool [R], of `confidence` float32 [R], in no order but theirs. Changes no argument.

        `noisy` [R] says which rows are noisy, `new` [R] which of them predict another token than the one they have.

        Equal confidences are taken from the left, as by the host. Nothing waits for the device.
        """
        owner, (first, _, least, threshold, factor, changes) = self.owner, self.rules.unbind()
        threshold, factor = threshold.view(torch.float64), factor.view(torch.float64)
        candidate = noisy & (self.ways == RANKED)
        # Stable sorts: first by confidence, then by request, candidates before the others.
        order = (-confidence).argsort(stable=True)
        order = order[(2 * owner + ~candidate)[order].argsort(stable=True)]
        every = torch.arange(len(order), device=order.device)
        rank = torch.empty_like(order).index_copy_(0, order, every - first[owner[order]])
        own = factor[owner]
        limit = torch.where(own >= 0, 1 - own / (rank + 2), threshold[owner])
        candidates, passed = (
            torch.zeros_like(first).index_add_(0, owner, rows.long())
            for rows in (candidate, candidate & (confidence.double() >= limit))
        )
        count = torch.maximum(least, passed)
        count = torch.where((factor >= 0) & (count >= candidates - 1), candidates, count)
        taken = candidate & (rank < count[owner])
        return (self.ways == KNOWN) | (taken & ((changes[owner] == 0) | (new & (confidence > 0))))

    def transfer(self, scores: Tensor, values: Tensor) -> Tensor:
        """Choose rows, and write their tokens to `values`, which holds twice a token, plus 1 where it is noisy.

        `scores` float32 [2 + n, R] hold tokens and confidences first. Returns them with one more row, which is 1 where
        a row was chosen. A token is final then, unless its rule may change it again.
        """
        there, tokens = values[self.targets[0]], scores[0].long()
        chosen = self.choose(scores[1], (there & 1).bool(), there >> 1 != tokens)
        put = 2 * tokens + self.rules[5][self.owner]
        # All targets are written, as counting the chosen ones would make the host wait. Others keep their values.
        for places in self.targets:
            values.index_copy_(0, places, torch.where(chosen, put, values[places]))
        return torch.cat((scores, chosen[None].to(scores.dtype)))
