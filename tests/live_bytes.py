"""Bytes of the tensors that are alive, added up operation by operation. On any device, the meta device included."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts memory that operations make while the mode is on, and gives off what nobody refers to any more.

    What an operation takes and gives back within itself is not seen.

    Attributes:
        now: bytes alive that were made under this mode.
        peak: most of them at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage(), given)
        return made

    def _note(self, storage: torch.UntypedStorage, given: set[torch.UntypedStorage]) -> None:
        if storage in given or storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size
