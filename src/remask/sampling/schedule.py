"""Schedules: how many positions each step of a block transfers, and how noise falls over a block."""

import numpy as np
from numpy.typing import NDArray

_ERROR = 2**-20  # bounds what float32 leaves uncertain of a share, and of a time


def even_count(masks: int, steps: int, step: int) -> int:
    """Return what `step` transfers in LLaDA's schedule: `masks` shared evenly, the remainder in the first steps."""
    return masks // steps + (step < masks % steps)


class TimeSchedule:
    """Dream's schedule: times fall linearly from 1 to `eps`; a step transfers the share by which time falls in it.

    All arithmetic is float32, as in the original: it decides how products round down. Nothing is stored per step.
    """

    def __init__(self, steps: int, eps: float) -> None:
        self.steps, self._last = steps, float(np.float32(eps))
        self._step = float((np.float32(eps) - np.float32(1)) / np.float32(steps))

    def time(self, index: int) -> np.float32:
        """Return the time before step `index`, from 1 at index 0 to `eps` at index `steps`, as PyTorch's linspace.

        That counts the first half from the start and the second from the end. Each product and its sum are rounded
        once, as a fused multiply-add does.
        """
        if index < (self.steps + 1) // 2:
            return np.float32(1 + self._step * index)
        return np.float32(self._last - self._step * (self.steps - index))

    def share(self, step: int) -> np.float32:
        """Return the share of the masked positions that `step` transfers; 1 in the last step."""
        if step >= self.steps - 1:
            return np.float32(1)
        return np.float32(1 - self.time(step + 1) / self.time(step))

    def count(self, step: int, masks: int) -> int:
        """Return how many positions `step` transfers when `masks` are masked, rounded down."""
        return int(np.float32(masks) * self.share(step))

    def busy(self, step: int, masks: int) -> int:
        """Return the first step from `step` on that transfers any of `masks` masked positions, 1 or more.

        A step transfers something once the time has fallen to about `masks` times what it falls by in one step. Only
        the steps around that time, where rounding decides, are looked at one by one. Their number grows with the
        square of `masks`, and with the number of steps only from millions on.
        """
        fall, last_step = -self._step, self.steps - 1
        if fall == 0:
            return max(step, last_step)
        if masks * _ERROR < 1:
            idle = (1 - fall * masks * (1 + masks * _ERROR)) / fall - self.steps * _ERROR - 2
            step = max(step, min(int(idle), last_step))
        while not self.count(step, masks):
            step += 1
        return step


def log_snrs(kind: str, steps: int, lowest: float, highest: float) -> NDArray[np.float64]:
    """Return GIDD's grid of log-SNRs over a block, float64 [steps + 1]: index 0 is the cleanest, `steps` the noisiest.

    The clean probability falls from its highest to its lowest value along a line ("linear") or half a cosine.
    """
    times = np.arange(steps + 1) / steps
    shape = 1 - times if kind == "linear" else (1 + np.cos(np.pi * times)) / 2
    low, high = (1 / (1 + np.exp(-bound)) for bound in (lowest, highest))
    clean = (high - low) * shape + low
    return np.asarray(np.clip(np.log(clean) - np.log1p(-clean), lowest, highest))
