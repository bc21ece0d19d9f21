"""Calls between ranks: which arguments are sent, and which every rank already has.

A call is its function and arguments, pickled without tensors. Tensors that an earlier call returned are on every rank,
and are referred to by a name, a number; the contents of all others follow in one buffer, which is broadcast.
"""

import io
import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from remask.model.pool import Pool
from remask.model.ranks import RankLocal
from remask.model.transformer import Transformer

Size: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
ALIGNMENT = 16  # bytes; each tensor of a buffer begins at a multiple of it


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A call as it is sent."""

    content: bytes  # function, arguments, the name of the result, and names that became free
    sent: Sequence[Tensor]  # tensors whose contents follow

    def buffer(self, device: torch.device) -> Tensor:
        """The contents of `sent`, uint8."""
        sizes = [_size(tensor) for tensor in self.sent]
        buffer = torch.empty(sum(map(_padded_bytes, sizes)), dtype=torch.uint8, device=device)
        for target, tensor in zip(_split_buffer(buffer, sizes), self.sent, strict=True):
            target.copy_(tensor, non_blocking=True)
        return buffer


class ObjectNames:
    """Names of objects that every rank has, given by rank 0. A name becomes free when rank 0 drops its object."""

    def __init__(self) -> None:
        self._next_name = itertools.count()
        self._storages: dict[int, int] = {}  # names of tensors by the address of their storage
        self._objects: dict[int, int] = {}  # names of other objects by their `id`
        self._free: deque[int] = deque()  # names to be forgotten; any thread may drop an object
        self._sent_count = 0  # number of these that the last call has sent

    def pack_call(self, act: Callable[..., object], args: Sequence[object]) -> tuple[RankMessage, int]:
        """Pack the call of `act` with `args`. Returns it, and the name that its result will have.

        Free names are in the call, and stay in the list until `record_result`, as sending may fail.
        """
        name = next(self._next_name)
        target = io.BytesIO()
        pickler = _Pickler(target, self)
        free = list(self._free)
        self._sent_count = len(free)
        pickler.dump((act, args, name, free))
        sizes = [_size(tensor) for tensor in pickler.sent]
        return RankMessage(pickle.dumps((sizes, target.getvalue())), pickler.sent), name

    def record_result(self, value: object, name: int) -> None:
        """Give the result of the last call its `name`, or free the name if `value` is not a tensor or a pool.

        Also drops the free names that the last call has sent.
        """
        for _ in range(self._sent_count):
            self._free.popleft()
        self._sent_count = 0
        if isinstance(value, Tensor) and value.numel() and value.is_contiguous():
            address = value.untyped_storage().data_ptr()
            self._storages[address] = name
            weakref.finalize(value, self._drop, self._storages, address, name).atexit = False
        elif isinstance(value, Pool):
            self._name_object(value, name)
        else:
            self._free.append(name)

    def object_name(self, value: object) -> int:
        """The name of a pool or a `RankLocal`, which gets a new one if it has none."""
        if id(value) not in self._objects:
            self._name_object(value, next(self._next_name))
        return self._objects[id(value)]

    def tensor_name(self, tensor: Tensor) -> int | None:
        """The name of the tensor that `tensor` is a view of. Returns None if its contents must be sent."""
        return self._storages.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _name_object(self, value: object, name: int) -> None:
        self._objects[id(value)] = name
        weakref.finalize(value, self._drop, self._objects, id(value), name).atexit = False

    def _drop(self, names: dict[int, int], key: int, name: int) -> None:
        """Free `name`, whose object is gone. Any thread may call it."""
        # A new tensor at the same address may have another name.
        if names.get(key) == name:
            del names[key]
        self._free.append(name)


class RankObjects:
    """The named objects of one rank other than 0."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._by_name: dict[int, Any] = {}

    def run(self, content: bytes, receive: Callable[[Tensor], Tensor]) -> None:
        """Run the call in `content`; `receive` fills a buffer with the contents of tensors that rank 0 sends."""
        sizes, call = pickle.loads(content)
        buffer = torch.empty(sum(map(_padded_bytes, sizes)), dtype=torch.uint8, device=self.model.device)
        act, args, name, free = _Unpickler(call, self, _split_buffer(receive(buffer), sizes)).load()
        for free_name in free:
            self._by_name.pop(free_name, None)
        result = act(*args)
        if isinstance(result, Tensor | Pool):
            self._by_name[name] = result

    def view(self, name: int, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """A view of a named tensor."""
        tensor: Tensor = self._by_name[name]
        return tensor.as_strided(shape, stride, offset)

    def object(self, name: int, object_type: type) -> object:
        """The object called `name`. Constructs a `RankLocal` of the class `object_type` if there is none."""
        if issubclass(object_type, RankLocal) and name not in self._by_name:
            self._by_name[name] = object_type()
        return self._by_name[name]


class _Pickler(pickle.Pickler):
    def __init__(self, target: io.BytesIO, names: ObjectNames) -> None:
        super().__init__(target, protocol=pickle.HIGHEST_PROTOCOL)
        self.names = names
        self.sent = list[Tensor]()
        self._indices: dict[int, int] = {}  # into `sent`, by `id`

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """What stands for a model, pool, `RankLocal` or tensor. Appends a tensor without a name to `sent`, once.

        Returns None for all other objects, which are pickled.
        """
        if isinstance(obj, Transformer):
            return ("model",)
        if isinstance(obj, Pool | RankLocal):
            return ("object", self.names.object_name(obj), type(obj))
        if not isinstance(obj, Tensor):
            return None
        name = self.names.tensor_name(obj)
        if name is not None:
            return ("view", name, tuple(obj.shape), obj.stride(), obj.storage_offset())
        if id(obj) not in self._indices:
            self._indices[id(obj)] = len(self.sent)
            self.sent.append(obj)
        return ("sent", self._indices[id(obj)])


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, objects: RankObjects, sent: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self.objects, self.sent = objects, sent

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        kind, *arguments = pid
        if kind == "model":
            return self.objects.model
        if kind == "sent":
            return self.sent[arguments[0]]
        return self.objects.view(*arguments) if kind == "view" else self.objects.object(*arguments)


def _size(tensor: Tensor) -> Size:
    return tensor.dtype, tuple(tensor.shape)


def _padded_bytes(size: Size) -> int:
    """Bytes of a tensor in a buffer, with padding up to the next one."""
    dtype, shape = size
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _split_buffer(buffer: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    """Views of `buffer`, uint8, as tensors of `sizes`."""
    tensors = []
    start = 0
    for dtype, shape in sizes:
        end = start + torch.Size(shape).numel() * dtype.itemsize
        tensors.append(buffer[start:end].view(dtype).view(shape))
        start += _padded_bytes((dtype, shape))
    return tensors
