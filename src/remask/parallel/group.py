"""Sums and exchanges between the ranks of one model, by `torch.distributed`."""

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from remask.model.ranks import Ranks, Shard

HOST = "127.0.0.1"
WAIT = timedelta(minutes=5)  # the longest wait of one rank for another, in one operation


class GroupRanks(Ranks):
    """One of several processes that compute one model.

    Attributes:
        operations: number of operations that were begun. Ranks with the same number are in step.
        sent: bytes that this rank gave to sums and gathers.
        received: bytes that rank 0 broadcast.
    """

    def __init__(self, shard: Shard, group: Any) -> None:
        self.shard = shard
        self.group = group
        self.operations = self.sent = self.received = 0

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():  # all ranks have the same shape
            self._begin()
            self.sent += x.nbytes
            self.group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = x.new_empty((self.shard.size, *x.shape))
        if x.numel():
            self._begin()
            self.sent += x.nbytes
            self.group.allgather([list(parts.unbind())], [x]).wait()
        return parts

    def share(self, x: Tensor) -> Tensor:
        """Broadcast rank 0's `x` into this rank's `x` of the same size, and return it."""
        if x.numel():
            self._begin()
            self.received += x.nbytes
            self.group.broadcast(x, 0).wait()
        return x

    def _begin(self) -> None:
        self.operations += 1


def open_store() -> str:
    """The path of a store by which ranks find each other, in a new folder that only this user can read.

    Ranks get the path over their connections to rank 0. A port instead would be open to every process of the machine.
    """
    return str(Path(tempfile.mkdtemp(prefix="remask-ranks-"), "store"))  # of mode 0700


def remove_store(path: str) -> None:
    """Remove a store and its folder, if they exist."""
    shutil.rmtree(Path(path).parent, ignore_errors=True)


def join_group(path: str, shard: Shard, device: torch.device) -> GroupRanks:
    """Join the other ranks at the store `path`, and wait for all of them: by NCCL on CUDA devices, by gloo on CPUs.

    The process' default group (`torch.distributed.init_process_group`), which may be its user's, is not used. Raises
    `RuntimeError` if a rank does not come within `WAIT`.
    """
    store = FileStore(path, shard.size)
    store.set_timeout(WAIT)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options: Any = ProcessGroupNCCL.Options()
        options._timeout = WAIT
        return GroupRanks(shard, ProcessGroupNCCL(store, shard.rank, shard.size, options))
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = WAIT
    return GroupRanks(shard, ProcessGroupGloo(store, shard.rank, shard.size, options))
