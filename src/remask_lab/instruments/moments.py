"""Correlations of drift, from sums that grow with every pass."""

import numpy as np

from remask_lab.instruments.series import Floats


class Moments:
    """First and second moments of the drift of K and V in all layers. One sample is a position from pass to pass.

    Any other two quantities by layer may stand in their place.
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
        covariance = self._covariance()
        deviation = np.sqrt(np.diag(covariance))
        with np.errstate(invalid="ignore", divide="ignore"):
            r = covariance / np.outer(deviation, deviation)
        return r[: self.layers, : self.layers], r[self.layers :, self.layers :]

    def paired_correlations(self) -> Floats:
        """Pearson's r between the drift of K and of V in each layer, [layers]; NaN where one of them never varies."""
        covariance = self._covariance()
        deviation = np.sqrt(np.diag(covariance))
        with np.errstate(invalid="ignore", divide="ignore"):
            r: Floats = np.diag(covariance[: self.layers, self.layers :]) / (
                deviation[: self.layers] * deviation[self.layers :]
            )
        return r

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

    def _covariance(self) -> Floats:
        if self.samples == 0:
            return np.full_like(self._products, np.nan)
        mean = self._sum / self.samples
        covariance: Floats = self._products / self.samples - np.outer(mean, mean)
        # Rounding may leave a constant's variance a little below 0.
        np.fill_diagonal(covariance, np.maximum(np.diag(covariance), 0.0))
        return covariance


def off_diagonal_mean(r: Floats) -> float:
    """Mean of all entries off the diagonal; NaN for a single layer."""
    off = r[~np.eye(len(r), dtype=np.bool_)]
    return float(off.mean()) if len(off) else float("nan")
