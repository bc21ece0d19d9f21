"""A rank other than 0: it loads its part of the model, and runs rank 0's calls until rank 0 ends."""

import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.checks import Quantization
from remask.model.ranks import Shard
from remask.model.transformer import Transformer
from remask.parallel.group import join_group, remove_store
from remask.parallel.message import RankObjects

PATIENCE_S = 10.0  # seconds that a failed rank waits for rank 0
WHERE = b""  # asks a rank for its state; calls are never empty


@dataclass(frozen=True, slots=True)
class Job:
    """The settings that a rank is started with."""

    settings: ModelSettings  # argument of `find_model`
    dtype: torch.dtype
    device: str
    shard: Shard
    threads: int  # CPU threads
    store: str  # result of `open_store`
    quantization: Quantization | None


@dataclass(frozen=True, slots=True)
class State:
    """A message of a rank about its state."""

    # Its weights are loaded; it has joined the group; it failed; or it answers `WHERE`
    kind: Literal["loaded", "met", "failed", "here"]
    operations: int = 0  # number of operations with other ranks that it has begun
    error: str = ""  # the reason of "failed"


def main(fd: int) -> None:
    """Serve rank 0 over the connection at the file descriptor `fd` until it ends."""
    # Rank 0 decides when the model ends, also where a terminal or a service manager signals all processes at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    rank0 = Connection(fd)
    with ExitStack() as stack:
        stack.enter_context(suppress(EOFError, BrokenPipeError, ConnectionResetError))  # rank 0 has ended
        job: Job = rank0.recv()
        stack.callback(remove_store, job.store)  # rank 0 may have been killed
        serve(job, rank0)


def serve(job: Job, rank0: Connection) -> None:
    """Load a part of the model, join the other ranks, and run rank 0's calls. Raises `EOFError` when rank 0 ends."""
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    try:
        loaded = find_model(job.settings).load(job.dtype, device, job.shard, job.quantization)
    # Rank 0 reports any error.
    except Exception as error:
        rank0.send(State("failed", error=f"{type(error).__name__}: {error}"))
        return
    rank0.send(State("loaded"))
    rank0.recv()  # every rank has loaded its part, so all will come
    ranks = join_group(job.store, job.shard, device)
    rank0.send(State("met"))  # before that it needs the store
    objects = RankObjects(Transformer(loaded.config, loaded.weights, ranks=ranks))
    while True:
        content = rank0.recv_bytes()
        if content == WHERE:
            rank0.send(State("here", ranks.operations))
            continue
        try:
            objects.run(content, ranks.share)
        except Exception as error:
            rank0.send(State("failed", ranks.operations, f"{type(error).__name__}: {error}"))
            # If rank 0 failed at the same operation it asks, and all ranks continue. Otherwise it waits for this rank,
            # until this process ends.
            if not rank0.poll(PATIENCE_S) or rank0.recv_bytes() != WHERE:
                raise
            rank0.send(State("here", ranks.operations))
