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

NEVER, KNOWN, RANKED = 0, 1, 2
"""Kinds of choice of a row: the device never chooses it, always, or by its rank if it is noisy."""
_CHOOSE_NONE = RankRule(0)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Predicted positions of one request. Some of them are transferred.

    Attributes:
        choice: the rule that chooses some of `positions`, or the chosen ones themselves. None: the host chooses.
        positions: the predicted positions, ascending, int64 [rows].
        block: the positions that may be transferred.
        places: for each canvas that gets the tokens, the index of each position in the token buffer, int64 [T].
    """

    choice: Transfers | None
    positions: Positions
    block: range
    places: Sequence[NDArray[np.int64]]

    def choice_kinds(self) -> int | NDArray[np.int64]:
        """The kind of choice of each position, int64 [rows], or one number that holds for all of them."""
        if self.choice is None or not len(self.positions):
            return NEVER
        if not isinstance(self.choice, RankRule):
            return KNOWN * np.isin(self.positions, self.choice).astype(np.int64)
        if self.block.start <= self.positions[0] and self.positions[-1] < self.block.stop:
            return RANKED
        inside = (self.positions >= self.block.start) & (self.positions < self.block.stop)
        return RANKED * inside.astype(np.int64)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """How R rows of N requests, one request after the other, are chosen, and where their tokens are written.

    Attributes:
        rules: int64 [6, N]: the first row of each request, its rows, and the fields of `RankRule`, of which `threshold`
            and `factor` are the bits of a float64; a factor of -1 is none.
        owner: index of each row's request, int64 [R].
        kinds: the kind of choice of each row, int64 [R].
        targets: the indices of each row in the token buffer, int64 [canvases, R]. The first canvas says whether a row
            is noisy, and which token it has.
        max_rows: the largest number of rows of a request.
    """

    rules: Tensor
    owner: Tensor
    kinds: Tensor
    targets: Tensor
    max_rows: int

    @classmethod
    def of(cls, requests: Sequence[Candidates], spare_index: int, device: torch.device) -> "RowChoice":
        """Send the choice of all `requests` to the device in one copy.

        The token buffer's `spare_index` is used for requests that have fewer canvases than others.
        """
        counts = np.array([len(request.positions) for request in requests])
        first_rows = counts.cumsum() - counts
        row_count = int(counts.sum())
        canvas_count = max(len(request.places) for request in requests)
        rank_rules = [request.choice if isinstance(request.choice, RankRule) else _CHOOSE_NONE for request in requests]
        size = 6 * len(requests)
        packed = np.empty(size + (2 + canvas_count) * row_count, dtype=np.int64)
        rules = packed[:size].reshape(6, len(requests))
        owner, kinds, *targets = packed[size:].reshape(2 + canvas_count, row_count)
        rules[0] = first_rows
        rules[1] = counts
        rules[2] = [rule.least for rule in rank_rules]
        rules[3].view(np.float64)[:] = [rule.threshold for rule in rank_rules]
        rules[4].view(np.float64)[:] = [-1.0 if rule.factor is None else rule.factor for rule in rank_rules]
        rules[5] = [rule.changes for rule in rank_rules]
        owner[:] = np.arange(len(requests)).repeat(counts)
        for start, request in zip(first_rows.tolist(), requests, strict=True):
            rows = slice(start, start + len(request.positions))
            kinds[rows] = request.choice_kinds()
            for canvas, target in enumerate(targets):
                has_canvas = canvas < len(request.places)
                target[rows] = request.places[canvas][request.positions] if has_canvas else spare_index
        device_packed = send(packed, device)
        by_row = device_packed[size:].view(2 + canvas_count, row_count)
        device_rules = device_packed[:size].view(6, len(requests))
        return cls(device_rules, by_row[0], by_row[1], by_row[2:], int(counts.max()))

    def choose(self, confidence: Tensor, noisy: Tensor, changes_token: Tensor) -> Tensor:
        """Return which rows are chosen, bool [R], by their `confidence`, float32 [R]. Changes no argument.

        `noisy`, bool [R]: the row is noisy. `changes_token`, bool [R]: the row predicts another token than it has. Of
        equal confidences the leftmost are chosen first, as on the host. The host does not wait.
        """
        owner = self.owner
        first, _, least, threshold, factor, changes = self.rules.unbind()
        threshold, factor = threshold.view(torch.float64), factor.view(torch.float64)
        candidate = noisy & (self.kinds == RANKED)
        # Stable sorts: first by confidence, then by request, candidates before the others.
        order = (-confidence).argsort(stable=True)
        order = order[(2 * owner + ~candidate)[order].argsort(stable=True)]
        sorted_index = torch.arange(len(order), device=order.device)
        rank = torch.empty_like(order).index_copy_(0, order, sorted_index - first[owner[order]])
        row_factor = factor[owner]
        limit = torch.where(row_factor >= 0, 1 - row_factor / (rank + 2), threshold[owner])
        candidates, passed = (
            torch.zeros_like(first).index_add_(0, owner, rows.long())
            for rows in (candidate, candidate & (confidence.double() >= limit))
        )
        count = torch.maximum(least, passed)
        count = torch.where((factor >= 0) & (count >= candidates - 1), candidates, count)
        is_ranked = candidate & (rank < count[owner])
        return (self.kinds == KNOWN) | (is_ranked & ((changes[owner] == 0) | (changes_token & (confidence > 0))))

    def transfer(self, scores: Tensor, values: Tensor) -> Tensor:
        """Choose rows, and write their tokens to the token buffer `values`, in place.

        An entry of the buffer is twice the token, plus 1 if it is noisy. A written token is final unless its rule has
        `changes`. `scores` float32 [2 + n, R] begin with tokens and confidences. Returns them with one more row, which
        is 1 for chosen rows and else 0.
        """
        old_values = values[self.targets[0]]
        tokens = scores[0].long()
        is_chosen = self.choose(scores[1], (old_values & 1).bool(), old_values >> 1 != tokens)
        new_values = 2 * tokens + self.rules[5][self.owner]
        # All targets are written, as counting the chosen ones would make the host wait. Others keep their values.
        for places in self.targets:
            values.index_copy_(0, places, torch.where(is_chosen, new_values, values[places]))
        return torch.cat((scores, is_chosen[None].to(scores.dtype)))
