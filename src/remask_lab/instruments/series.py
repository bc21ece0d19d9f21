"""Means of series that may have gaps and different lengths."""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mean(values: Floats) -> float:
    """Mean of all numbers among `values`; NaN where there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def by_pass(series: Sequence[Floats]) -> tuple[float, ...]:
    """Mean over requests of what each pass showed, for as many passes as the longest request has."""
    table = np.full((len(series), max(map(len, series))), np.nan)
    for row, values in zip(table, series, strict=True):
        row[: len(values)] = values
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        means: Floats = np.nanmean(table, axis=0)
    return tuple(means.tolist())
