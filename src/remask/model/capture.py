"""What device graphs do: operations that ran once are run again, on the same memory, without the code that made them.

On CUDA devices they are CUDA graphs. On a CPU a stand-in records operations, so that what relies on graphs can be
tested there: like a graph it knows addresses and operations alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remask.errors import ConfigError

Work: TypeAlias = Callable[[], None]

_ATEN = torch.ops.aten
# What only makes room. Nothing is computed, so nothing is to be repeated.
_ROOM = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}


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
    if device.type == "cpu":
        return Recording()
    raise ConfigError(f"graphs=True needs a CUDA device or, for tests, a CPU; the device is {device}")


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


class Recording:
    """The stand-in for a CPU: PyTorch's operations, and launches of kernels in Triton's interpreter.

    Results that the operations make are NaN before they are made again. A number that is read back is refused, as a
    graph has none to give.
    """

    def __call__(self, work: Work) -> Work:
        """See `Capture`."""
        recorder = _Recorder()
        with recorder, _recording(recorder):
            work()
        return recorder.again


def launch(kernel: Work) -> None:
    """Run `kernel`, which launches what PyTorch does not see, in a way that can be recorded."""
    recorder = _RECORDER.get()
    if recorder is None:
        kernel()
    else:
        recorder.launch(kernel)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Work] = []
        self._made: list[Tensor] = []
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not self._paused:
            self._note(func, args, kwargs, made)
        return made

    def launch(self, kernel: Work) -> None:
        """Run `kernel`, of which PyTorch's operations are the interpreter's own."""
        self._paused = True
        try:
            kernel()
        finally:
            self._paused = False
        self._steps.append(kernel)

    def again(self) -> None:
        """Run all steps, after what they make was filled with NaN."""
        for tensor in self._made:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for step in self._steps:
            step()

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        schema = func._schema
        if any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments):
            self._steps.append(partial(func, *args, **kwargs))
            return
        results = tree_leaves(made)
        if not all(isinstance(each, Tensor) for each in results):
            raise RuntimeError(f"{func} gives the host a number, and a graph cannot hold what depends on it")
        given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        if any(_memory(each) in given for each in results):
            return  # the same memory, seen in another way
        self._made += results
        if func.overloadpacket not in _ROOM:
            self._steps.append(partial(_remake, results, func, args, kwargs))


def _remake(results: list[Tensor], func: Any, args: Any, kwargs: Any) -> None:
    for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
        old.copy_(new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_RECORDER: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)
