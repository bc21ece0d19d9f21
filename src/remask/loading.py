"""Loads a model: in which numbers, with how many threads and in how many processes it computes, and why."""

from dataclasses import dataclass

import torch

from remask.checkpoint.loaded import FoundModel, LoadedModel
from remask.engine.capacity import DeviceMemory, check_weights_fit
from remask.engine.config import DEFAULT_UTILIZATION
from remask.engine.few_bits import Asked, resolve_quantization
from remask.machine.cpu import CpuReading, memory, physical_cores
from remask.machine.device import Threads, resolve_dtype, resolve_threads, set_threads
from remask.model.quantised import check_quantization, described
from remask.model.ranks import Ranks, Shard
from remask.parallel import lead


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that has been loaded, and how that was chosen.

    Attributes:
        ranks: the processes that it is spread over.
        threads: those of each process.
        numbers: in which numbers it computes, and why: the first half of the start-up line.
    """

    loaded: LoadedModel
    ranks: Ranks
    threads: Threads
    numbers: str


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is to be loaded. The fields are arguments of `LLM`."""

    dtype: str
    device: torch.device
    quantization: Asked
    threads: int | None
    spare_cores: int
    tensor_parallel: int
    check_weights: bool
    utilization: float | None
    progress: bool

    def open(self, found: FoundModel, since: CpuReading | None) -> Opened:
        """Load `found`. What can be refused without the weights is, as reading these may take minutes.

        The number of threads follows from what other processes have done `since` then. Raises `ConfigError` and
        `CheckpointError`.
        """
        config, place, ranks = found.config, self.device, self.tensor_parallel
        dtype, why = resolve_dtype(self.dtype, place, config.parameters)
        room = self._room()
        quantization, bits_why = resolve_quantization(
            self.quantization, found.quantization, config, dtype, place, room, ranks
        )
        for rank in range(ranks):
            check_quantization(quantization, Shard(rank, ranks).part(config), place)
        if room is not None:
            check_weights_fit(config, dtype, room, ranks, apart=place.type == "cuda", quantization=quantization)
        check, progress = self.check_weights, self.progress
        name = str(dtype).removeprefix("torch.")
        numbers = f"dtype={name} ({why}) quantization={described(quantization, place)} ({bits_why})"
        if ranks == 1:
            loaded = found.load(dtype, place, progress=progress, check=check, quantization=quantization)
            return Opened(loaded, Ranks(), self._threads(found, since), numbers)
        used = self._threads(found, since)
        loaded, several = lead.start(
            found, dtype, place, ranks, used.number, progress=progress, check=check, quantization=quantization
        )
        return Opened(loaded, several, used, numbers)

    def _room(self) -> DeviceMemory | None:
        """What the weights may take; None where the system does not say."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return DeviceMemory(total, free, self.utilization or DEFAULT_UTILIZATION)
        there = memory()
        return None if there is None else DeviceMemory(*there, 1.0)

    def _threads(self, found: FoundModel, since: CpuReading | None) -> Threads:
        """Set the number of threads that each process computes on, and return it."""
        if self.threads is None and self.device.type != "cpu":
            return Threads(torch.get_num_threads(), "PyTorch's own, as the model is on another device")
        processes = self.tensor_parallel
        threads = resolve_threads(self.threads, found.config.parameters // processes, self.spare_cores, since)
        share = max(1, physical_cores() // processes)
        if self.threads is None and processes > 1 and threads.number > share:
            threads = Threads(share, f"{physical_cores()} cores for {processes} processes")
        set_threads(threads)
        return threads
