"""Calls between ranks: which arguments are sent, and which every rank already has.

A call is its function and arguments, pickled. Tensors are not in there: those that an earlier call returned stand on
every rank, and are named; the contents of all others follow in one buffer, which is broadcast.
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

    content: bytes  # function, arguments, the name of the result, and names that are free
    sent: Sequence[Tensor]  # the tensors whose contents follow

    def buffer(self, device: torch.device) -> Tensor:
        """The contents of `sent`, uint8."""
        sizes = [_size(tensor) for tensor in self.sent]
        buffer = torch.empty(sum(map(_room, sizes)), dtype=torch.uint8, device=device)
        for place, tensor in zip(_split(buffer, sizes), self.sent, strict=True):
            place.copy_(tensor, non_blocking=True)
        return buffer


class ObjectNames:
    """The names that rank 0 gives to what every rank has. A name is free once rank 0 has dropped its object."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._storages: dict[int, int] = {}  # names of tensors by the address of their memory
        self._objects: dict[int, int] = {}  # names of other objects by their identity
        self._free: deque[int] = deque()  # any thread may drop an object
        self._sent = 0  # how many of these the last call names

    def call(self, act: Callable[..., object], args: Sequence[object]) -> tuple[RankMessage, int]:
        """The call of `act` with `args`, and the name of its result."""
        number, target = next(self._numbers), io.BytesIO()
        pickler = _Pickler(target, self)
        free = list(self._free)  # until the call is sent, which may fail before
        self._sent = len(free)
        pickler.dump((act, args, number, free))
        sizes = [_size(tensor) for tensor in pickler.sent]
        return RankMessage(pickle.dumps((sizes, target.getvalue())), pickler.sent), number

    def give(self, value: object, number: int) -> None:
        """`value`, which the last call returned on every rank, is called `number` from now on."""
        for _ in range(self._sent):
            self._free.popleft()
        self._sent = 0
        if isinstance(value, Tensor) and value.numel() and value.is_contiguous():
            address = value.untyped_storage().data_ptr()
            self._storages[address] = number
            weakref.finalize(value, self._drop, self._storages, address, number).atexit = False
        elif isinstance(value, Pool):
            self._name(value, number)
        else:
            self._free.append(number)

    def of_object(self, value: object) -> int:
        """The name of an object that has one from the first call on in which it is an argument."""
        return self._objects[id(value)] if id(value) in self._objects else self._name(value, next(self._numbers))

    def of_tensor(self, tensor: Tensor) -> int | None:
        """The name of the tensor that `tensor` is a view of; None where its contents must be sent."""
        return self._storages.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _name(self, value: object, number: int) -> int:
        self._objects[id(value)] = number
        weakref.finalize(value, self._drop, self._objects, id(value), number).atexit = False
        return number

    def _drop(self, names: dict[int, int], key: int, number: int) -> None:
        # The memory of a tensor may have got another name since.
        if names.get(key) == number:
            del names[key]
        self._free.append(number)


class Things:
    """The objects of one rank other than 0, by name."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._named: dict[int, Any] = {}

    def run(self, content: bytes, receive: Callable[[Tensor], Tensor]) -> None:
        """Take part in a call: `receive` fills a buffer with what rank 0 sends."""
        sizes, call = pickle.loads(content)
        buffer = torch.empty(sum(map(_room, sizes)), dtype=torch.uint8, device=self.model.device)
        act, args, number, free = _Unpickler(call, self, _split(receive(buffer), sizes)).load()
        for name in free:
            self._named.pop(name, None)
        result = act(*args)
        if isinstance(result, Tensor | Pool):
            self._named[number] = result

    def view(self, name: int, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """A view of a named tensor."""
        tensor: Tensor = self._named[name]
        return tensor.as_strided(shape, stride, offset)

    def object(self, name: int, kind: type) -> object:
        """A named object of this `kind`."""
        if issubclass(kind, RankLocal) and name not in self._named:
            self._named[name] = kind()
        return self._named[name]


class _Pickler(pickle.Pickler):
    def __init__(self, target: io.BytesIO, names: ObjectNames) -> None:
        super().__init__(target, protocol=pickle.HIGHEST_PROTOCOL)
        self.names, self.sent = names, list[Tensor]()
        self._places: dict[int, int] = {}  # in `sent`, by identity

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, Transformer):
            return ("model",)
        if isinstance(obj, Pool | RankLocal):
            return ("object", self.names.of_object(obj), type(obj))
        if not isinstance(obj, Tensor):
            return None
        name = self.names.of_tensor(obj)
        if name is not None:
            return ("view", name, tuple(obj.shape), obj.stride(), obj.storage_offset())
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.sent)
            self.sent.append(obj)
        return ("sent", self._places[id(obj)])


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, things: Things, sent: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self.things, self.sent = things, sent

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        kind, *rest = pid
        if kind == "model":
            return self.things.model
        if kind == "sent":
            return self.sent[rest[0]]
        return self.things.view(*rest) if kind == "view" else self.things.object(*rest)


def _size(tensor: Tensor) -> Size:
    return tensor.dtype, tuple(tensor.shape)


def _room(size: Size) -> int:
    """Bytes of a tensor in a buffer."""
    dtype, shape = size
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _split(buffer: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    tensors, at = [], 0
    for dtype, shape in sizes:
        end = at + torch.Size(shape).numel() * dtype.itemsize
        tensors.append(buffer[at:end].view(dtype).view(shape))
        at += _room((dtype, shape))
    return tensors
