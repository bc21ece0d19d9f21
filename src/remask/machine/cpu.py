"""The processor as this process may use it: cores, a container's quota, use by others, instructions; and memory.

This module does not import PyTorch, as `wait_passively` must run before PyTorch is loaded.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
# Threads sleep while they wait for each other. GNU's OpenMP, which PyTorch's packages for Linux bring, reads the first
# variable; Intel's and LLVM's read both.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
# Instructions that multiply matrices of bfloat16: Intel's and AMD's, and Arm's.
BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
SHORTEST_S = 0.2  # seconds between two readings, as the processor's clocks count hundredths of a second
# From this size on, bfloat16 takes less time than float32 for single requests too (`docs/lab/log.md`).
BFLOAT16_PARAMETERS = 5_000_000
_MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_QUOTA_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def wait_passively() -> bool:
    """Make OpenMP's threads sleep while they wait for each other, by the environment. Returns whether they do.

    By default they spin for milliseconds; on a busy machine such a thread takes the core that its own team waits for.
    Changes nothing if PyTorch is imported, as OpenMP has read the environment then, or if a policy is set already.
    """
    if "torch" not in sys.modules and not os.environ.keys() & PASSIVE.keys():
        os.environ.update(PASSIVE)
    return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


def cores() -> int:
    """Cores that this process may run on, by its affinity mask."""
    return len(_affinity())


def physical_cores(root: Path = ROOT) -> int:
    """The number of physical cores among `cores`; hardware threads of one core count once."""
    physical = set()
    for number in _affinity():
        topology = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
        physical.add(_read_text(topology / "thread_siblings_list") or str(number))
    return len(physical)


def quota(root: Path = ROOT) -> float | None:
    """The number of cores that control groups (versions 1 and 2) allow this process. Returns None without a limit."""
    limits = [limit for group, version in _groups(root, "cpu") for limit in _cpu_limits(group, version)]
    return min(limits) if limits else None


def memory(root: Path = ROOT) -> tuple[int, int] | None:
    """Total and free bytes of memory, within control groups and `ulimit -v`. Returns None outside Linux."""
    words = dict(line.split(":", 1) for line in (_read_text(root / "proc/meminfo") or "").splitlines() if ":" in line)
    if not {"MemTotal", "MemAvailable"} <= words.keys():
        return None
    total, free = (int(words[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for group, version in _groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else _MEMORY_V1
        limit, used = (_read_text(group / name) or "max" for name in names)
        if limit != "max" and used != "max" and int(limit) < total:
            total = int(limit)
            free = min(free, max(0, total - int(used) + _reclaimable_bytes(group, version)))
    address_limit, used_addresses = _address_space(root)
    if address_limit is not None and address_limit < total:
        total, free = address_limit, min(free, max(0, address_limit - used_addresses))
    return total, free


def _address_space(root: Path) -> tuple[int | None, int]:
    """The limit on bytes of address space of this process, None if there is none, and the bytes that it uses."""
    limits = re.search(r"^Max address space +(\d+)", _read_text(root / "proc/self/limits") or "", re.MULTILINE)
    size = re.search(r"^VmSize:\s+(\d+) kB", _read_text(root / "proc/self/status") or "", re.MULTILINE)
    if limits is None or size is None:
        return None, 0
    return int(limits[1]), int(size[1]) * 1024


def _reclaimable_bytes(group: Path, version: int) -> int:
    """Bytes of cached files that count as used by a group, and that the kernel drops if memory is short."""
    counts = dict(line.split() for line in (_read_text(group / "memory.stat") or "").splitlines())
    return int(counts.get("inactive_file" if version == 2 else "total_inactive_file", 0))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The control groups of this process that may limit `controller`, "cpu" or "memory", and their versions."""
    groups = root / "sys/fs/cgroup"
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be the host's; the container's own group is then at the mount point.
        steps = [part for part in path.split("/") if part not in ("", "..")]
        for base in (groups, groups / "unified") if not controllers else (groups / controllers, groups / controller):
            for depth in range(len(steps) + 1):
                yield base.joinpath(*steps[:depth]), 1 if controllers else 2


def _cpu_limits(group: Path, version: int) -> Iterator[float]:
    """The group's limit on cores, if it has one."""
    if version == 2:
        words = (_read_text(group / "cpu.max") or "max").split()
    else:
        words = [_read_text(group / name) or "-1" for name in _QUOTA_V1]
    if len(words) == 2 and words[0] not in ("max", "-1") and float(words[1]) > 0:
        yield float(words[0]) / float(words[1])


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Processor time in seconds of the cores of this process, since they were started."""

    clock: float  # time of the reading, in seconds of a monotonic clock
    # Time of all processes. Those of low priority do not count if this process has a higher one, as they give way.
    busy_time: float
    stolen_time: float  # that the host of a virtual machine gave to others
    own_time: float  # of this process and its finished children


@dataclass(frozen=True, slots=True)
class OthersUse:
    """Cores that others used between two readings."""

    seconds: float  # time between the readings
    cores: int  # number of cores of this process
    used: float  # mean number of cores that other processes used, including stolen time
    stolen: float  # mean number of cores that the host of a virtual machine gave to others


def read_cpu(root: Path = ROOT) -> CpuReading | None:
    """Read the clocks of the processor. Returns None outside Linux."""
    text = _read_text(root / "proc/stat")
    if text is None:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    names = {f"cpu{number}" for number in _affinity()}
    busy = stolen = 0.0
    for line in text.splitlines():
        name, *values = line.split()
        if name in names:
            user, low, system, _, _, hard, soft, steal = map(int, values[:8])
            gives_way = os.getpriority(os.PRIO_PROCESS, 0) > 0
            busy += (user + system + hard + soft + steal + (low if gives_way else 0)) / ticks
            stolen += steal / ticks
    times = os.times()
    return CpuReading(time.monotonic(), busy, stolen, sum(times[:4]))


def others_use(start: CpuReading | None, end: CpuReading | None) -> OthersUse | None:
    """The use by others from `start` to `end`. Returns None if a reading is missing, or no time has passed."""
    if start is None or end is None or end.clock <= start.clock:
        return None
    seconds = end.clock - start.clock
    used_cores = (end.busy_time - start.busy_time - (end.own_time - start.own_time)) / seconds
    stolen_cores = (end.stolen_time - start.stolen_time) / seconds
    return OthersUse(seconds, cores(), min(max(used_cores, 0.0), float(cores())), stolen_cores)


def measure_others_use(start: CpuReading | None) -> OthersUse | None:
    """The use by others from `start` to now. Returns None if `start` is None or the clocks cannot be read.

    Sleeps until `SHORTEST_S` seconds have passed since `start`, as the clocks are coarse.
    """
    if start is None:
        return None
    time.sleep(max(0.0, SHORTEST_S - (time.monotonic() - start.clock)))
    return others_use(start, read_cpu())


def may_have_gpu(root: Path = ROOT) -> bool:
    """Whether there may be a CUDA device: not if a driver's files are missing. Otherwise only PyTorch knows."""
    drivers = ("dev/nvidiactl", "dev/nvhost-ctrl-gpu", "dev/kfd", "dev/dxg")  # Nvidia, Jetson, AMD, Windows' Linux
    return sys.platform not in ("linux", "darwin") or any((root / name).exists() for name in drivers)


def instructions(root: Path = ROOT) -> frozenset[str]:
    """Names of the processor's instruction sets, as Linux lists them; empty elsewhere."""
    for line in (_read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()


def usual_dtype(parameters: int, cpu_instructions: frozenset[str]) -> tuple[str, str]:
    """The default number format for a model of `parameters` weights on a CPU with `cpu_instructions`, and the reason.

    It is bfloat16 if requests then take less time than in float32: if there are instructions for it, and the model is
    so large that matrix products take most of the time. Nothing is measured, so a machine gives the same answers on
    every start.
    """
    native = sorted(BFLOAT16 & cpu_instructions)
    if not native:
        return "float32", "auto: this CPU has no instructions for bfloat16"
    if parameters < BFLOAT16_PARAMETERS:
        return "float32", f"auto: {parameters / 1e6:.3g} million parameters gain nothing from bfloat16"
    return "bfloat16", f"auto: this CPU has {' and '.join(native)}"


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
