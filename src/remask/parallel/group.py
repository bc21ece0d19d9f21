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
WAIT = timedelta(minutes=5)  # of one rank for another, in one operation


class GroupRanks(Ranks):
    """One of several processes that compute one model.

    Attributes:
        operations: operations begun so far. Ranks that have begun equally many are in step.
        sent: bytes that this rank gave to sums and gathers so far.
        received: bytes of what rank 0 sent to all, so far.
    """

    def __init__(self, shard: Shard, group: Any) -> None:
        self.shard, self.group = shard, group
        self.operations = self.sent = self.received = 0

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():  # how many rows there are is known to all ranks
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
        """Rank 0's `x`, in the place of this rank's, which has its size."""
        if x.numel():
            self._begin()
            self.received += x.nbytes
            self.group.broadcast(x, 0).wait()
        return x

    def _begin(self) -> None:
        self.operations += 1


def open_store() -> str:
    """Where the ranks find each other: a path in a new folder that only this user can read, with a name of its own.

    The path is told through the connections between rank 0 and its children alone. A port would be open to every
    process of the machine.
    """
    return str(Path(tempfile.mkdtemp(prefix="remask-ranks-"), "store"))  # of mode 0700


def remove_store(path: str) -> None:
    """Remove a store and its folder, which may be gone. The group may use it as long as it is there."""
    shutil.rmtree(Path(path).parent, ignore_errors=True)


def join_group(path: str, shard: Shard, device: torch.device) -> GroupRanks:
    """Meet the other ranks at the store `path`, and wait until all have come: NCCL on CUDA devices, gloo on CPUs.

    No group of the process as a whole is touched (`torch.distributed.init_process_group`), which may be its user's.
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
