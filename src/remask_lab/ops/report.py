"""What a profile of operations came to: plain numbers, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a machine reaches by itself: FLOPs a second of a matrix product, bytes a second of a copy."""

    flops_s: float
    bytes_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on the product, and not the copy, is the limit."""
        return self.flops_s / self.bytes_s

    def roof(self, intensity: float) -> float:
        """FLOPs a second that are attainable at so many FLOPs a byte (the roofline model)."""
        return min(self.flops_s, intensity * self.bytes_s)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of the engine.

    Attributes:
        row_layers: rows computed in it, times layers.
        seconds: its time without instruments.
        parts: seconds by operation, with instruments; they add up to the step.
        flops, bytes: by operation, what its plans ask for.
        executed: FLOPs that the machine ran, padding and repeated projections included.
    """

    row_layers: int
    seconds: float
    parts: Mapping[str, float]
    flops: Mapping[str, int]
    bytes: Mapping[str, int]
    executed: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        moved = sum(self.bytes.values())
        return sum(self.flops.values()) / moved if moved else 0.0

    @property
    def flops_s(self) -> float:
        """FLOPs a second, without instruments."""
        return sum(self.flops.values()) / self.seconds


@dataclass(frozen=True, slots=True)
class OperationProfile:
    """One operation over all steps.

    Attributes:
        seconds: with instruments.
        share: of all time.
        flops, bytes: what plans ask for; 0 of operations that are no matrix products.
    """

    seconds: float
    share: float
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def flops_s(self) -> float:
        """FLOPs a second."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a policy's steps goes.

    Attributes:
        steps: in order.
        overhead: what instruments add to the time, as a share of it.
        counted: FLOPs of all steps as PyTorch counts them.
    """

    steps: tuple[StepProfile, ...]
    overhead: float
    counted: int

    @property
    def operations(self) -> dict[str, OperationProfile]:
        """By name, in the order of the steps' parts."""
        spent = _sums([step.parts for step in self.steps])
        flops, moved = _sums([step.flops for step in self.steps]), _sums([step.bytes for step in self.steps])
        whole = sum(spent.values())
        return {
            name: OperationProfile(seconds, seconds / whole, int(flops.get(name, 0)), int(moved.get(name, 0)))
            for name, seconds in spent.items()
        }


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}
