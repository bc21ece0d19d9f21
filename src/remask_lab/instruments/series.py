"""Means of series that may have gaps and different lengths."""

import warnings
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Series: TypeAlias = tuple[float, ...]
"""One number for each pass; NaN where there is nothing to measure."""
Table: TypeAlias = tuple[Series, ...]
"""[rows][columns]; NaN where there is nothing to measure."""


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


def as_table(values: Floats) -> Table:
    """A matrix as plain numbers."""
    return tuple(tuple(row) for row in values.tolist())
