"""Means of series that may have gaps and different lengths."""

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
    return tuple(mean_of_known(padded(series)).tolist())


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
