"""Distances between what two passes computed at the same positions."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Changes:
    """Cosine distances of features from each pass to the next, in every layer."""

    def __init__(self) -> None:
        self._before: list[list[Tensor]] = []  # unit vectors [rows, D], by layer and feature

    def take(self, layers: Iterable[Sequence[Tensor]]) -> Tensor | None:
        """Distances to the features that were taken before, [features, layers, rows]; None where these are the first.

        `layers` has the features of each layer, [rows, ...]. Only the leading rows that both passes have are compared.
        """
        before, self._before = self._before, [[units(feature) for feature in layer] for layer in layers]
        if not before:
            return None
        moved = [
            torch.stack([distance(*pair) for pair in zip(*both, strict=True)])
            for both in zip(before, self._before, strict=True)
        ]
        return torch.stack(moved, dim=1)


def units(x: Tensor) -> Tensor:
    """Vectors [rows, ...] as unit vectors [rows, D] in float32, heads concatenated."""
    return F.normalize(x.flatten(1).float(), dim=-1)


def distance(before: Tensor, after: Tensor) -> Tensor:
    """1 - cosine of unit vectors [..., rows, D], without the cancellation; of the leading rows that both have."""
    common = min(before.shape[-2], after.shape[-2])
    found: Tensor = (before[..., :common, :] - after[..., :common, :]).square().sum(dim=-1) / 2
    return found
