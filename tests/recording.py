"""Graphs on a CPU: a stand-in for CUDA graphs, so that what relies on them is tested without a GPU.

Like a graph it knows addresses and operations alone. `tests.device` puts it in the place of CUDA graphs.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remask.model.graphs import Capture, Work, capture_on

KERNELS = ("remask.model.attention_triton", "remask.model.layer_triton")  # modules that launch kernels within a layer

_ATEN = torch.ops.aten
# What only makes room. Nothing is computed, so nothing is to be repeated.
_ROOM = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}


def recorded_on(device: torch.device) -> Capture:
    """As `capture_on`, with the stand-in on a CPU."""
    return Recording() if device.type == "cpu" else capture_on(device)


class Recording:
    """The stand-in for a CPU: PyTorch's operations, and launches of kernels in Triton's interpreter.

    Results that the operations make are NaN before they are made again. A number that is read back is refused, as a
    graph has none to give.
    """

    def __call__(self, work: Work) -> Work:
        recorder = _Recorder()
        with recorder, ExitStack() as stack:
            for name in KERNELS:
                if name in sys.modules:
                    module = sys.modules[name]
                    stack.enter_context(patch.object(module, "launch", partial(recorder.launch, module.launch)))
            work()
        return recorder.again


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

    def launch(self, launch: Callable[..., None], *arguments: Any, **constants: Any) -> None:
        """Launch a kernel, in which PyTorch's operations are the interpreter's own."""
        kernel = partial(launch, *arguments, **constants)
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
