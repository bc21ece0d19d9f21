"""Indices of rows and slots: runs of consecutive ones are read in place."""

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.model.stage import Run

Index: TypeAlias = NDArray[np.int64]


def runs(slots: Index) -> list[Run]:
    """`slots` as runs of consecutive ones."""
    cuts = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
    edges = [0, *cuts.tolist(), len(slots)]
    return [slice(int(slots[a]), int(slots[b - 1]) + 1) for a, b in pairwise(edges)]


def send_run(index: Index, device: torch.device) -> Run | Tensor:
    """An index as a slice where it is one run, which is then read in place; else on the device."""
    in_place = runs(index)
    return in_place[0] if len(in_place) == 1 else send(index, device)
