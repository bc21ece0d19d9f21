"""Transfers between host and device: arrays are sent without waiting, and only results are waited for."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, with the same dtype. On a CPU they share their memory. The host does not wait.

    The copy is from pinned memory, as others block the host; the caching allocator keeps it until it was read.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Arrival:
    """A tensor on its way to the host, which must not be written. Later work on the device does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._copied = None
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
    """`tensor` on the host. Waits until the device has computed it."""
    return Arrival(tensor).wait()
