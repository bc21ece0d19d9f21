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


class Arrival:
    """A tensor on its way to the host, which nobody writes to. What is queued on the device later does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._copied = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> NDArray[Any]:
        """The tensor on the host. Waits until the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()
        array: NDArray[Any] = self._tensor.cpu().numpy()
        return array


def fetch(tensor: Tensor) -> NDArray[Any]:
    """`tensor` on the host. Waits until the device has computed it; nothing else in a pass waits."""
    return Arrival(tensor).wait()
