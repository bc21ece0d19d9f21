"""Schedules: how many positions each step of a block transfers, and how noise falls over a block."""

import numpy as np
from numpy.typing import NDArray


def even_counts(masks: int, steps: int) -> NDArray[np.int64]:
    """Return LLaDA's schedule, int64 [steps]: `masks` shared evenly, with the remainder in the first steps."""
    counts = np.full(steps, masks // steps, dtype=np.int64)
    counts[: masks % steps] += 1
    return counts


class TimeSchedule:
    """Dream's schedule: times fall linearly from 1 to `eps`; a step transfers the share by which time falls in it.

    All arithmetic is float32, as in the original: it decides how products round down.
    """

    def __init__(self, steps: int, eps: float) -> None:
        self.times: NDArray[np.float32] = _linspace(1.0, eps, steps + 1)

    def share(self, step: int) -> np.float32:
        """Return the share of the masked positions that `step` transfers; 1 in the last step."""
        if step >= len(self.times) - 2:
            return np.float32(1)
        return np.float32(1 - self.times[step + 1] / self.times[step])

    def count(self, step: int, masks: int) -> int:
        """Return how many positions `step` transfers when `masks` are masked, rounded down."""
        return int(np.float32(masks) * self.share(step))


def _linspace(start: float, stop: float, points: int) -> NDArray[np.float32]:
    """Return a linspace in PyTorch's order of operations: the first half from the start, the second from the stop.

    Each product and its sum are rounded once, as a fused multiply-add does.
    """
    step = np.float64((np.float32(stop) - np.float32(start)) / np.float32(points - 1))
    index = np.arange(points, dtype=np.float64)
    forward = np.float64(np.float32(start)) + step * index
    backward = np.float64(np.float32(stop)) - step * (points - 1 - index)
    return np.where(index < points // 2, forward, backward).astype(np.float32)


def log_snrs(kind: str, steps: int, lowest: float, highest: float) -> NDArray[np.float64]:
    """Return GIDD's grid of log-SNRs over a block, float64 [steps + 1]: index 0 is the cleanest, `steps` the noisiest.

    The clean probability falls from its highest to its lowest value along a line ("linear") or half a cosine.
    """
    times = np.arange(steps + 1) / steps
    shape = 1 - times if kind == "linear" else (1 + np.cos(np.pi * times)) / 2
    low, high = (1 / (1 + np.exp(-bound)) for bound in (lowest, highest))
    clean = (high - low) * shape + low
    return np.asarray(np.clip(np.log(clean) - np.log1p(-clean), lowest, highest))
