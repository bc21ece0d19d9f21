"""Host arrays on the device, without a wait."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, of the same type. On a CPU they share their memory.

    Only pinned memory is copied while the host goes on. The caching allocator keeps a pinned copy until it has been
    read.
    """
    sent = torch.from_numpy(np.ascontiguousarray(array))
    return sent if device.type == "cpu" else sent.pin_memory().to(device, non_blocking=True)
