"""How similarities become the depths of a table, under a `DepthRule`."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.depth.rule import DepthRule

Floats: TypeAlias = NDArray[np.float64]


def limits_of(rule: DepthRule, curves: Floats) -> Floats:
    """Limits of single curves of similarities, which may be those of requests or means: [..., layers] both."""
    if rule.layers == "leading":
        reached = np.minimum.accumulate(curves, axis=-1)
    else:
        reached = np.maximum.accumulate(curves[..., ::-1], axis=-1)[..., ::-1]
    if rule.boundary == "paper":
        return reached
    return np.concatenate([reached[..., 1:], reached[..., -1:]], axis=-1)


def table_limits(rule: DepthRule, measured: Floats) -> Floats:
    """Limits of a table, [ratios, layers], from the curves of N requests, [N, ratios, layers]."""
    if rule.requests == "mean-curve":
        return limits_of(rule, measured.mean(axis=0))
    if rule.requests == "least-depth":
        least: Floats = limits_of(rule, measured).min(axis=0)
        return least
    requests, ratios, _ = measured.shape
    falling = -np.sort(-np.moveaxis(limits_of(rule, measured), 0, 1).reshape(ratios, -1), axis=1)
    # The mean of N depths is at least b where N b of all their limits are above tau.
    return falling[:, requests - 1 :: requests]


def depth_at(limits: Sequence[float], tau: float) -> int:
    """The depth that `limits` give at `tau`."""
    return sum(limit > tau for limit in limits)


def depth_entries(limits: Mapping[int, Sequence[float]], tau: float) -> dict[int, int]:
    """Entries of a table with these limits by ratio: a ratio is added where it is deeper than all before it."""
    entries: dict[int, int] = {}
    deepest = 0
    for ratio in sorted(limits):
        depth = depth_at(limits[ratio], tau)
        if depth > deepest:
            entries[ratio] = deepest = depth
    return entries
