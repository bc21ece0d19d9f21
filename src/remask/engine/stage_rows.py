"""One canvas' part in a stage of a pass."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.spans import Span
from remask.engine.canvas_state import CanvasState, SlotTable, runs
from remask.models.stage import Run
from remask.sending import send

Index = NDArray[np.int64]


@dataclass(slots=True)  # not frozen, as one is made for each canvas of each stage
class StageRows:
    """The rows of one canvas in one stage."""

    branch: CanvasState
    span: Span
    table: SlotTable
    positions: Index
    rows: slice  # among the stage's flat rows
    sees: Index | None  # how many leading positions of the canvas each row attends to; None: all


def send_run(index: Index, device: torch.device) -> Run | Tensor:
    """An index as a slice where it is one run, which is then read in place; else on the device."""
    in_place = runs(index)
    return in_place[0] if len(in_place) == 1 else send(index, device)
