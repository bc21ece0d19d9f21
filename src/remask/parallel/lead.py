"""Rank 0: starts the other ranks, sends them calls, and notices when one is lost."""

import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Pipe
from typing import Any, TypeVar

import torch

from remask.checkpoint.loaded import FoundModel, LoadedModel
from remask.checks import Quantization
from remask.errors import CheckpointError, ConfigError, RankLostError
from remask.machine.log_format import logs_json
from remask.model.ranks import Shard
from remask.parallel.group import GroupRanks, join_group, open_store, remove_store
from remask.parallel.message import ObjectNames
from remask.parallel.worker import PATIENCE_S, WHERE, Job, State

log = logging.getLogger(__name__)

T = TypeVar("T")

JSON = "--json"  # flag of another rank's process: it logs JSON, as this one does
END_S = 5.0  # seconds that the other ranks have to end before they are killed
WATCH_S = 0.5  # seconds between two checks whether they run


class Worker:
    """The process of another rank, and the connection to it."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.connection, other_end = Pipe()
        fd = other_end.fileno()
        command = [sys.executable, "-m", "remask.parallel", str(fd), *([JSON] if logs_json() else [])]
        self.process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL)
        other_end.close()

    @property
    def name(self) -> str:
        """The rank and its process, for messages."""
        return f"rank {self.shard.rank} of {self.shard.size} (process {self.process.pid})"

    @property
    def ended(self) -> str | None:
        """How the process has ended, in words. Returns None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"{self.name} was killed by signal {-code}" if code < 0 else f"{self.name} ended with status {code}"

    def receive(self, seconds: float | None) -> State | None:
        """Receive the rank's next message. Returns None if it has ended, or after `seconds` (None: no limit)."""
        try:
            if not self.connection.poll(seconds):
                return None
            state: State = self.connection.recv()
        except (EOFError, OSError):
            return None
        return state


class LeadRanks(GroupRanks):
    """Rank 0 of several, in which the engine runs. One thread at a time may call it, except `lose`."""

    def __init__(self, ranks: GroupRanks, workers: Sequence[Worker], device: torch.device, store: str) -> None:
        """Take over `workers` and `store`, which end with this object. Starts a thread that watches the workers."""
        super().__init__(ranks.shard, ranks.group)
        self._workers = workers
        self._device = device
        self._names = ObjectNames()
        self._acting = False
        self._lost_lock = threading.Lock()
        self._closed = threading.Event()
        self._end = weakref.finalize(self, end_workers, workers, self._closed, store)
        watch = threading.Thread(
            target=_watch, args=(workers, self._closed, weakref.ref(self)), name="remask-ranks", daemon=True
        )
        watch.start()

    def run_on_all(self, act: Callable[..., T], *args: Any) -> T:
        """See `Ranks`. Raises `RankLostError` if a rank has ended, or ends or falls out of step in the call.

        If `act` fails at the same operation on all ranks, its error on this rank is raised, and the ranks stay usable.
        """
        self.check()
        call, name = self._names.pack_call(act, args)
        buffer = call.buffer(self._device)
        self._acting = True
        try:
            for worker in self._workers:
                worker.connection.send_bytes(call.content)
            self.share(buffer)
            result = act(*args)
        except Exception as error:
            self._names.record_result(None, name)
            self._check_in_step(error)
            raise
        except BaseException:
            self.lose("a pass was interrupted")
            raise
        finally:
            self._acting = False
        self._names.record_result(result, name)
        return result

    def check(self) -> None:
        if self.lost is None:
            ended = _first_end(self._workers)
            if self._closed.is_set():
                self.lose("the other ranks were ended by close()")
            elif ended is not None:
                self.lose(ended)
        if self.lost is not None:
            raise RankLostError(str(self.lost))

    def lose(self, reason: str) -> None:
        """Set `lost`, unless it is set, abort operations that wait for other ranks, and end these.

        Any thread may call it, as the one that watches the workers does beside the engine's.
        """
        with self._lost_lock:
            is_first = self.lost is None
            if is_first:
                self.lost = RankLostError(
                    f"{reason}. The model is spread over {self.shard.size} processes, and none of them can go on "
                    "without the others: load it again"
                )
        if is_first:
            log.error("%s", self.lost)
            if self._device.type == "cuda":
                self.group.abort()  # gloo notices by itself
        self.close()

    def close(self) -> None:
        self._end()

    def _begin(self) -> None:
        if not self._acting:
            raise ConfigError(
                f"this computes with one process, and the model is spread over {self.shard.size}: "
                "load it with tensor_parallel=1"
            )
        super()._begin()

    def _check_in_step(self, error: Exception) -> None:
        """After `error` on this rank, raise `RankLostError` unless all ranks have begun the same number of operations.

        Equal numbers mean that all ranks have failed at the same operation, so that the model can still be used.
        """
        reasons = []
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send_bytes(WHERE)
        for worker in self._workers:
            # A rank that has failed sends its error first, and then its state.
            first = state = worker.receive(PATIENCE_S)
            if first is not None and first.kind == "failed":
                state = worker.receive(PATIENCE_S)
            if state is None or state.operations != self.operations:
                reasons.append(_reason(worker, "" if first is None else first.error))
        if reasons:
            self.lose("; ".join(reasons))
            raise RankLostError(str(self.lost)) from error


def start(
    model: FoundModel, dtype: torch.dtype, device: torch.device, threads: int, quantization: Quantization | None = None
) -> tuple[LoadedModel, LeadRanks]:
    """Load a model in `tensor_parallel` processes. Returns the part of this process, rank 0, and its ranks.

    On CUDA each rank has a device of its own, from `device` on. The other processes end with this one, with
    `LeadRanks.close`, or with the object; each has `threads` CPU threads. Raises `ConfigError`, before anything is
    started, if the model cannot be cut for so many ranks or there are too few devices, and `CheckpointError` if a rank
    cannot load its part.
    """
    size, settings = model.settings.tensor_parallel, replace(model.settings, reads=None, progress=False)
    Shard(0, size).check(model.config)
    devices = rank_devices(device, size)
    store, workers = open_store(), list[Worker]()
    try:
        for rank, rank_device in enumerate(devices[1:], start=1):
            workers.append(Worker(Shard(rank, size)))
            job = Job(settings, dtype, str(rank_device), Shard(rank, size), threads, store, quantization)
            workers[-1].connection.send(job)
        loaded = model.load(dtype, devices[0], Shard(0, size), quantization)
        _await(workers, "loaded")
        for worker in workers:
            worker.connection.send(None)
        ranks = join_group(store, Shard(0, size), devices[0])
        _await(workers, "met")
    except BaseException:
        end_workers(workers, threading.Event(), store)
        raise
    return loaded, LeadRanks(ranks, workers, devices[0], store)


def _await(workers: Sequence[Worker], kind: str) -> None:
    """Wait for a message of the `kind` from every rank. Raises `CheckpointError` if one sends another, or ends."""
    for worker in workers:
        state = worker.receive(None)
        if state is None or state.kind != kind:
            raise CheckpointError(_reason(worker, "" if state is None else state.error))


def rank_devices(device: torch.device, size: int) -> list[torch.device]:
    """The device of every rank: on a CPU the same one. Raises `ConfigError` if there are too few CUDA devices."""
    if device.type != "cuda":
        return [device] * size
    start, count = device.index or 0, torch.cuda.device_count()
    if start + size > count:
        raise ConfigError(
            f"tensor_parallel={size} from {str(device)!r} on needs {start + size} CUDA devices, and {count} can be "
            "seen; use fewer ranks, or make more devices visible (CUDA_VISIBLE_DEVICES)"
        )
    return [torch.device("cuda", start + rank) for rank in range(size)]


def end_workers(workers: Sequence[Worker], closed: threading.Event, store: str) -> None:
    """End the processes of other ranks, wait until they have ended, and remove the store."""
    closed.set()
    for worker in workers:
        worker.connection.close()  # a rank ends when its connection to rank 0 does
    for worker in workers:
        try:
            worker.process.wait(END_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    remove_store(store)


def _first_end(workers: Sequence[Worker]) -> str | None:
    """How the first worker that has ended did so, in words. Returns None while all run."""
    return next(filter(None, (worker.ended for worker in workers)), None)


def _watch(workers: Sequence[Worker], closed: threading.Event, weak_ranks: "weakref.ref[LeadRanks]") -> None:
    """Call `LeadRanks.lose` when a rank ends, also while this process waits for it or is idle. Runs on a thread."""
    while not closed.wait(WATCH_S):
        ended = _first_end(workers)
        ranks = weak_ranks()
        if ended is not None and ranks is not None:
            ranks.lose(ended)
        del ranks  # while the thread sleeps, it must not keep the object alive


def _reason(worker: Worker, error: str) -> str:
    """The reason why a rank cannot continue, in words; `error` is what it has reported, or empty."""
    if error:
        return f"{worker.name} failed: {error}"
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(WATCH_S)
    return worker.ended or f"{worker.name} is out of step"
