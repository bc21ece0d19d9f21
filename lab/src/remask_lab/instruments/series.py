"""Means of series that may have gaps and different lengths, and correlations of two quantities by layer."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Series: TypeAlias = tuple[float, ...]
"""One number for each pass; NaN where there is nothing to measure."""
Table: TypeAlias = tuple[Series, ...]
"""[rows][columns]; NaN where there is nothing to measure."""


def mean(values: Floats) -> float:
    """Mean of all numbers among `values`; NaN where there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def by_pass(series: Sequence[Sequence[float] | Floats]) -> Series:
    """Mean over requests of what each pass showed, for as many passes as the longest request has."""
    return tuple(mean_of_known(padded([np.asarray(own, dtype=np.float64) for own in series])).tolist())


def padded(series: Sequence[Floats], length: int | None = None) -> Floats:
    """All of `series`, [n, ..., length]: they differ in the length of their last axis only, and NaN fills the rest.

    `length` None takes that of the longest.
    """
    longest = max(each.shape[-1] for each in series) if length is None else length
    table: Floats = np.full((len(series), *series[0].shape[:-1], longest), np.nan)
    for row, values in zip(table, series, strict=True):
        row[..., : values.shape[-1]] = values
    return table


def mean_of_known(values: Floats) -> Floats:
    """Mean over the first axis of the numbers there; NaN where there are none."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    found: Floats = np.where(known, values, 0.0).sum(axis=0) / np.where(count, count, np.nan)
    return found


def as_table(values: Floats) -> Table:
    """A matrix as plain numbers."""
    return tuple(tuple(row) for row in values.tolist())


class Moments:
    """First and second moments of the drift of K and V, or of two other quantities, in all layers.

    One sample is a position from pass to pass. The sums grow with every pass.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.samples = layers, 0
        self._sum = np.zeros(2 * layers)
        self._products = np.zeros((2 * layers, 2 * layers))

    def add(self, k: Floats, v: Floats) -> None:
        """Take in drifts [layers, positions]."""
        both = np.concatenate([k, v]).astype(np.float64)
        self.samples += both.shape[1]
        self._sum += both.sum(axis=1)
        self._products += both @ both.T

    def merge(self, other: "Moments") -> None:
        """Take in all samples of `other`, which is not changed."""
        self.samples += other.samples
        self._sum += other._sum
        self._products += other._products

    def layer_correlations(self) -> tuple[Floats, Floats]:
        """Pearson's r between layers, of K and of V, [layers, layers] each; NaN where a layer's drift never varies."""
        r = self._correlations()
        return r[: self.layers, : self.layers], r[self.layers :, self.layers :]

    def means(self) -> tuple[float, float]:
        """The mean drift of K and of V, over all layers, positions and passes; NaN without a sample."""
        if self.samples == 0:
            return float("nan"), float("nan")
        k, v = self._sum.reshape(2, self.layers).mean(axis=1) / self.samples
        return float(k), float(v)

    def kv_correlation(self) -> float:
        """Pearson's r between the drift of K and of V, over all layers, positions and passes; NaN without variance."""
        count = self.samples * self.layers
        if count == 0:
            return float("nan")
        k, v = slice(0, self.layers), slice(self.layers, None)
        mean_k, mean_v = self._sum[k].sum() / count, self._sum[v].sum() / count
        cross = np.trace(self._products[k, v]) / count - mean_k * mean_v
        spread = [np.trace(self._products[part, part]) / count - m * m for part, m in ((k, mean_k), (v, mean_v))]
        scale = float(np.sqrt(max(0.0, spread[0]) * max(0.0, spread[1])))
        return float(cross) / scale if scale > 0 else float("nan")

    def _correlations(self) -> Floats:
        """Pearson's r of all layers' K and V with one another."""
        if self.samples == 0:
            return np.full_like(self._products, np.nan)
        mean = self._sum / self.samples
        covariance: Floats = self._products / self.samples - np.outer(mean, mean)
        # Rounding may leave a constant's variance a little below 0.
        deviation = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        np.fill_diagonal(covariance, deviation**2)
        with np.errstate(invalid="ignore", divide="ignore"):
            r: Floats = covariance / np.outer(deviation, deviation)
        return r


def off_diagonal_mean(r: Floats) -> float:
    """Mean of all entries off the diagonal; NaN for a single layer."""
    return mean(np.where(np.eye(len(r), dtype=np.bool_), np.nan, r))


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
