"""Ranks that are threads of one process, for what needs no processes: sums are exact in the order of the ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from remask.model.ranks import Ranks, Shard

T = TypeVar("T")
PATIENCE = 60.0


class ThreadRanks(Ranks):
    def __init__(self, shard: Shard, barrier: threading.Barrier, places: list[Tensor | None]) -> None:
        self.shard, self._barrier, self._places = shard, barrier, places

    def gather(self, x: Tensor) -> Tensor:
        self._places[self.shard.rank] = x.clone()
        self._barrier.wait(PATIENCE)
        every = torch.stack([place for place in self._places if place is not None])
        self._barrier.wait(PATIENCE)
        return every

    def sum(self, x: Tensor) -> Tensor:
        return self.gather(x).sum(dim=0)


def together(size: int, act: Callable[[ThreadRanks], T]) -> list[T]:
    """What `act` returns on each of `size` ranks. Raises what one of them raises."""
    barrier, places = threading.Barrier(size), list[Tensor | None]([None] * size)

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return act(ThreadRanks(Shard(rank, size), barrier, places))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        begun = [threads.submit(run, rank) for rank in range(size)]
    failures = [error for each in begun if (error := each.exception()) is not None]
    for error in failures:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [each.result() for each in begun]
