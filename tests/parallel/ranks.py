"""Processes that serve as ranks of one model after another, so that many tests pay for one start."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe

import pytest

from remask.model.ranks import Shard
from remask.model.transformer import Transformer
from remask.parallel import lead, worker
from remask.parallel.group import GroupRanks

MODELS = 64  # that one process can serve


class Served(subprocess.Popen[bytes]):
    """A process that goes on to the next connection where one is closed: nobody waits for its end."""

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        """The end of a model is not that of the process."""
        return 0


class Lender:
    """One process that tests lend to models as a rank. It starts when the first model asks for it."""

    def __init__(self) -> None:
        self.connections: Iterator[Connection] = iter(())
        self._process: Served | None = None

    @property
    def process(self) -> Served:
        if self._process is None:
            self._process = self._start()
        return self._process

    def _start(self) -> Served:
        ours, theirs = zip(*(Pipe() for _ in range(MODELS)), strict=True)
        numbers = [str(end.fileno()) for end in theirs]
        self.connections = iter(ours)
        process = Served(
            [sys.executable, "-m", "tests.parallel.ranks", *numbers],
            pass_fds=[int(number) for number in numbers],
            stdin=subprocess.DEVNULL,
        )
        for end in theirs:
            end.close()
        return process

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            subprocess.Popen.wait(self._process)
        for connection in self.connections:
            connection.close()


@contextmanager
def lent(patch: pytest.MonkeyPatch, lenders: list[Lender]) -> Iterator[None]:
    """Models are loaded with the processes of `lenders` as ranks 1, 2, ..."""

    def borrow(self: lead.Worker, shard: Shard) -> None:
        lender = lenders[shard.rank - 1]
        self.shard, self.process = shard, lender.process
        self.connection = next(lender.connections)

    with patch.context() as context:
        context.setattr(lead.Worker, "__init__", borrow)
        yield


# What ranks are called with. They look for it here, where little is imported, as rank 0 waits for them.


def raises(model: Transformer, rank: int | None) -> None:
    """On one rank, or on all."""
    if rank in (None, model.ranks.shard.rank):
        raise ValueError("on purpose")


def interrupted(model: Transformer) -> None:
    """On rank 0."""
    if model.ranks.shard.rank == 0:
        raise KeyboardInterrupt


def begins_and_raises(model: Transformer) -> None:
    """Another rank has begun an operation more, as where a device does not wait for it."""
    ranks = model.ranks
    assert isinstance(ranks, GroupRanks)
    ranks.operations += ranks.shard.rank
    raise ValueError("on purpose")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        worker.main(int(each))
