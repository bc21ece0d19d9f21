"""One canvas' part in a stage of a pass."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.plan import Span
from remask.engine.canvas_state import CanvasState, SlotTable, runs
from remask.models.stage import Run

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageRows:
    """The rows of one canvas in one stage."""

    branch: CanvasState
    span: Span
    table: SlotTable
    positions: Index
    rows: slice  # among the stage's flat rows
    sees: Index | None  # how many leading positions of the canvas each row attends to; None: all


def send(index: Index, device: torch.device) -> Tensor:
    """An index on the device, int64, without waiting."""
    return torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)).to(device, non_blocking=True)


def send_run(index: Index, device: torch.device) -> Run | Tensor:
    """An index as a slice where it is one run, which is then read in place; else on the device."""
    in_place = runs(index)
    return in_place[0] if len(in_place) == 1 else send(index, device)


def send_mask(mask: NDArray[np.bool_], device: torch.device) -> Tensor:
    """A mask on the device, without waiting."""
    return torch.from_numpy(np.ascontiguousarray(mask)).to(device, non_blocking=True)
