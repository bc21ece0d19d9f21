"""Lists of token ids, kept in one array each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences of token ids, one after the other.

    Attributes:
        values: the ids of all of them.
        ends: where each ends in `values`.
    """

    values: NDArray[np.uint32]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int] | Ids]) -> "Ragged":
        """Those sequences."""
        kept = [np.asarray(each, np.uint32) for each in sequences]
        ends = np.cumsum([len(each) for each in kept], dtype=np.int64)
        return cls(np.concatenate(kept) if kept else np.empty(0, np.uint32), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Ids:
        start = self.ends[number - 1] if number else 0
        return self.values[start : self.ends[number]].astype(np.int32)

    def slice(self, start: int, stop: int) -> "Ragged":
        """Those from `start` to before `stop`."""
        return Ragged.of(self[number] for number in range(start, min(stop, len(self))))


def save_ragged(file: Path, **named: Ragged) -> None:
    """Write them to a compressed `.npz`."""
    np.savez_compressed(
        file, **{f"{name}.{part}": getattr(each, part) for name, each in named.items() for part in ("values", "ends")}
    )


def load_ragged(file: Path) -> dict[str, Ragged]:
    """What `save_ragged` wrote."""
    with np.load(file) as found:
        names = {name.partition(".")[0] for name in found.files}
        return {name: Ragged(found[f"{name}.values"], found[f"{name}.ends"]) for name in names}
