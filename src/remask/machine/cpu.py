"""What this process may use of the processor: cores, a container's quota, what others leave free, instructions.

Importing this module imports no PyTorch, as some of it must be done before PyTorch is loaded.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
# How threads wait for each other. GNU's OpenMP, which PyTorch's packages for Linux bring, reads the first; Intel's and
# LLVM's read both.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
# Instructions that multiply matrices of bfloat16: Intel's and AMD's, and Arm's.
BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
SHORTEST_S = 0.2  # the clocks of the processor go in hundredths of a second
# From this size on, bfloat16 takes less time than float32 for single requests too, as `docs/lab/log.md` tells.
BFLOAT16_PARAMETERS = 5_000_000
_MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_QUOTA_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def wait_passively() -> bool:
    """Make OpenMP's threads sleep while they wait for each other. Returns whether they do.

    By default they spin for milliseconds. On a machine with other work, a thread then takes from its own team the core
    that the team waits for. OpenMP reads the environment when PyTorch loads it, so afterwards this changes nothing; nor
    does it where the environment names a policy.
    """
    if "torch" not in sys.modules and not os.environ.keys() & PASSIVE.keys():
        os.environ.update(PASSIVE)
    return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


def cores() -> int:
    """Cores that this process may run on, by its affinity mask."""
    return len(_affinity())


def physical_cores(root: Path = ROOT) -> int:
    """The number of physical cores among `cores`; hardware threads of one core count once."""
    cores_seen = set()
    for number in _affinity():
        topology = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
        siblings = _read(topology / "thread_siblings_list")
        cores_seen.add(siblings or str(number))
    return len(cores_seen)


def quota(root: Path = ROOT) -> float | None:
    """Cores that control groups (versions 1, 2) and their parents allow this process at most; None: no limit."""
    limits = [limit for group, version in _groups(root, "cpu") for limit in _limit(group, version)]
    return min(limits) if limits else None


def memory(root: Path = ROOT) -> tuple[int, int] | None:
    """Bytes of memory in all, and those that system, control groups and `ulimit -v` leave. None outside Linux."""
    words = dict(line.split(":", 1) for line in (_read(root / "proc/meminfo") or "").splitlines() if ":" in line)
    if not {"MemTotal", "MemAvailable"} <= words.keys():
        return None
    total, free = (int(words[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for group, version in _groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else _MEMORY_V1
        limit, used = (_read(group / name) or "max" for name in names)
        if limit != "max" and used != "max" and int(limit) < total:
            total = int(limit)
            free = min(free, max(0, total - int(used) + _dropped(group, version)))
    most, used_addresses = _address_space(root)
    if most is not None and most < total:
        total, free = most, min(free, max(0, most - used_addresses))
    return total, free


def _address_space(root: Path) -> tuple[int | None, int]:
    """Bytes of addresses that this process may have, None without a limit, and those that it has."""
    limits = re.search(r"^Max address space +(\d+)", _read(root / "proc/self/limits") or "", re.MULTILINE)
    size = re.search(r"^VmSize:\s+(\d+) kB", _read(root / "proc/self/status") or "", re.MULTILINE)
    if limits is None or size is None:
        return None, 0
    return int(limits[1]), int(size[1]) * 1024


def _dropped(group: Path, version: int) -> int:
    """Bytes of files that count as used by a group, and that the kernel drops where memory is short."""
    counts = dict(line.split() for line in (_read(group / "memory.stat") or "").splitlines())
    return int(counts.get("inactive_file" if version == 2 else "total_inactive_file", 0))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The control groups of this process that may limit what `controller` names, and their versions."""
    groups = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be the host's; the container's own group is then where the groups are mounted.
        steps = [part for part in path.split("/") if part not in ("", "..")]
        for base in (groups, groups / "unified") if not controllers else (groups / controllers, groups / controller):
            for depth in range(len(steps) + 1):
                yield base.joinpath(*steps[:depth]), 1 if controllers else 2


def _limit(group: Path, version: int) -> Iterator[float]:
    """In cores, if the group has one."""
    if version == 2:
        words = (_read(group / "cpu.max") or "max").split()
    else:
        words = [_read(group / name) or "-1" for name in _QUOTA_V1]
    if len(words) == 2 and words[0] not in ("max", "-1") and float(words[1]) > 0:
        yield float(words[0]) / float(words[1])


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Time that the cores of this process have spent, in seconds of processor time since they were started."""

    clock: float  # when it was read, in seconds of a monotonic clock
    # Time in which they computed for any process. Processes of low priority do not count where this one has a higher
    # one, as they give way.
    busy: float
    stolen: float  # time that the host of a virtual machine gave to others
    own: float  # time that this process and its finished children have computed


@dataclass(frozen=True, slots=True)
class OthersUse:
    """What others used between two readings."""

    seconds: float  # time between the readings
    cores: int  # the number of cores of this process
    used: float  # cores that other processes used on average, time that was stolen included
    stolen: float  # cores that the host of a virtual machine gave to others, on average


def read_cpu(root: Path = ROOT) -> CpuReading | None:
    """Read the clocks of the processor. None outside Linux."""
    text = _read(root / "proc/stat")
    if text is None:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    counted = {f"cpu{number}" for number in _affinity()}
    busy = stolen = 0.0
    for line in text.splitlines():
        name, *values = line.split()
        if name in counted:
            user, low, system, _, _, hard, soft, steal = map(int, values[:8])
            gives_way = os.getpriority(os.PRIO_PROCESS, 0) > 0
            busy += (user + system + hard + soft + steal + (low if gives_way else 0)) / ticks
            stolen += steal / ticks
    used = os.times()
    return CpuReading(time.monotonic(), busy, stolen, sum(used[:4]))


def others_use(first: CpuReading | None, last: CpuReading | None) -> OthersUse | None:
    """What others used from `first` to `last`. None where it is not known, or no time has passed."""
    if first is None or last is None or last.clock <= first.clock:
        return None
    seconds = last.clock - first.clock
    used = (last.busy - first.busy - (last.own - first.own)) / seconds
    stolen = (last.stolen - first.stolen) / seconds
    return OthersUse(seconds, cores(), min(max(used, 0.0), float(cores())), stolen)


def others_since(first: CpuReading | None) -> OthersUse | None:
    """What others used from `first` to now. Waits where that is shorter than what the clocks can measure."""
    if first is None:
        return None
    time.sleep(max(0.0, SHORTEST_S - (time.monotonic() - first.clock)))
    return others_use(first, read_cpu())


def may_have_gpu(root: Path = ROOT) -> bool:
    """Whether there may be a CUDA device: PyTorch alone knows, and where a driver's files are missing there is none."""
    drivers = ("dev/nvidiactl", "dev/nvhost-ctrl-gpu", "dev/kfd", "dev/dxg")  # Nvidia, Jetson, AMD, Windows' Linux
    return sys.platform not in ("linux", "darwin") or any((root / name).exists() for name in drivers)


def instructions(root: Path = ROOT) -> frozenset[str]:
    """Names of the processor's instruction sets, as Linux lists them; none elsewhere."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()


def usual_dtype(parameters: int, known: frozenset[str]) -> tuple[str, str]:
    """The number format for a model of so many `parameters` on a CPU that has the `known` instructions, and why.

    bfloat16 where whole requests take less time than in float32: with instructions for it, and for large models, where
    matrix products take most of the time. Facts decide and no measurement, so one machine gives the same answers on
    every start.
    """
    native = sorted(BFLOAT16 & known)
    if not native:
        return "float32", "auto: this CPU has no instructions for bfloat16"
    if parameters < BFLOAT16_PARAMETERS:
        return "float32", f"auto: {parameters / 1e6:.3g} million parameters gain nothing from bfloat16"
    return "bfloat16", f"auto: this CPU has {' and '.join(native)}"


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
