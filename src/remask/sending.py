"""Between host and device: arrays go there without a wait, and what comes back is the one thing that is waited for."""

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


def fetch(tensor: Tensor) -> NDArray[Any]:
    """`tensor` on the host. Waits until the device has computed it; nothing else in a pass waits."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
