"""Device graphs: operations that ran once are run again, on the same memory, without the code that made them."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from remask.errors import ConfigError

Work: TypeAlias = Callable[[], None]


class Capture(Protocol):
    """Captures work."""

    def __call__(self, work: Work) -> Work:
        """Run `work`, and return what runs its operations again.

        These read and write the memory that they had the first time, which whoever asks must keep. What `work` does on
        the host is not repeated, and it must not wait for the device.
        """
        ...


def capture_on(device: torch.device) -> Capture:
    """What captures on `device`. Raises `ConfigError` where nothing does."""
    if device.type == "cuda":
        return CudaCapture(device)
    raise ConfigError(f"graphs=True needs a CUDA device, and the device is {device}; leave graphs out")


class CudaCapture:
    """CUDA graphs, which share one pool of memory: they run one after another, and keep nothing between them there."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """See `Capture`. The host waits until the device is idle."""
        work()  # kernels are compiled, and libraries allocate what they need, before anything is captured
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay
