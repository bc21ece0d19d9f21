"""Confidence intervals of measured shares."""

import math
from collections.abc import Sequence


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % by default. It stays within [0, 1] and also holds for small counts."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    margin = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


def percent_text(share: float, interval: Sequence[float]) -> str:
    """A share and its interval as reports show them: "50.0 % (40.0 to 60.0)"."""
    low, high = interval
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
