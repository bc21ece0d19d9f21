"""What the processor offers, read from files as Linux writes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from remask.machine import cpu
from remask.machine.cpu import CpuReading, measure_others_use, others_use, quota, read_cpu
from tests.waiting import eventually


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return root


def groups(of_process: str, limits: dict[str, str]) -> dict[str, str]:
    """What Linux tells of control groups: those of the process, and their files."""
    return {"proc/self/cgroup": of_process} | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}


V1 = "5:cpu,cpuacct:/docker/abc\n3:cpuset:/\n"
QUOTAS: dict[str, tuple[dict[str, str], float | None]] = {
    "version 2": (groups("0::/a/b", {"a/b/cpu.max": "150000 100000"}), 1.5),
    "the parent is tighter": (groups("0::/a/b", {"a/b/cpu.max": "90000 100000", "a/cpu.max": "50000 100000"}), 0.5),
    "version 2 in a container": (groups("0::/", {"cpu.max": "200000 100000"}), 2.0),
    "version 2 beside version 1": (groups("1:cpu:/\n0::/a", {"unified/a/cpu.max": "300000 100000"}), 3.0),
    "version 1": (
        groups(
            V1,
            {
                "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
                "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            },
        ),
        2.5,
    ),
    "version 1 in a container": (
        groups(V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}),
        1.0,
    ),
    "no limit": (
        groups(
            V1 + "0::/",
            {"cpu.max": "max 100000", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        ),
        None,
    ),
    "no control groups": ({}, None),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_a_containers_quota(tmp_path: Path, name: str) -> None:
    files, cores = QUOTAS[name]
    assert quota(write(tmp_path, files)) == cores


def test_cores_are_those_of_the_affinity_mask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4}, raising=False)
    assert cpu.cores() == 3
    assert cpu.physical_cores(tmp_path) == 3, "without a topology each counts"
    siblings = {0: "0,4", 1: "1,5", 4: "0,4"}
    files = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": text for n, text in siblings.items()}
    assert cpu.physical_cores(write(tmp_path, files)) == 2


@pytest.mark.parametrize(("priority", "busy"), [(0, 16.0), (19, 20.0)])
def test_the_clocks_are_those_of_our_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, priority: int, busy: float
) -> None:
    """Time of low priority counts only where ours is low as well; idle time and waiting for disks never do."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    monkeypatch.setattr(os, "getpriority", lambda *_: priority)
    tick = os.sysconf("SC_CLK_TCK")
    numbers = [value * tick for value in (7, 4, 5, 900, 80, 1, 1, 2, 0, 0)]
    line = " ".join(map(str, numbers))
    root = write(tmp_path, {"proc/stat": f"cpu {line}\ncpu0 {line}\ncpu1 {line}\nctxt 1"})
    read = read_cpu(root)
    assert read is not None
    assert (read.busy_time, read.stolen_time) == (busy, 2.0)
    assert read_cpu(tmp_path / "nowhere") is None


def test_what_others_use_is_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cores", lambda: 4)
    first = CpuReading(clock=10.0, busy_time=100.0, stolen_time=1.0, own_time=5.0)
    use = others_use(first, CpuReading(clock=12.0, busy_time=105.0, stolen_time=2.0, own_time=7.0))
    assert use is not None
    assert (use.seconds, use.cores, use.used, use.stolen) == (2.0, 4, 1.5, 0.5)
    rounded = others_use(first, CpuReading(clock=12.0, busy_time=101.0, stolen_time=1.0, own_time=7.0))
    assert rounded is not None
    assert rounded.used == 0.0, "the clocks are rounded, and no use is below 0"
    assert others_use(None, first) is others_use(first, None) is others_use(first, first) is None
    assert measure_others_use(None) is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux, whose /proc/stat is read")
def test_a_neighbour_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            began = read_cpu()
            eventually(lambda: (use := measure_others_use(began)) is not None and use.used >= 0.05)
        finally:
            neighbour.kill()


def test_instructions(tmp_path: Path) -> None:
    x86 = write(tmp_path / "x86", {"proc/cpuinfo": "flags\t\t: fpu avx512_bf16\n"})
    assert cpu.instructions(x86) == {"fpu", "avx512_bf16"}
    arm = write(tmp_path / "arm", {"proc/cpuinfo": "Features\t: fp asimd bf16\n"})
    assert "bf16" in cpu.instructions(arm)
    assert cpu.instructions(tmp_path / "none") == frozenset()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where PyTorch brings GNU's OpenMP")
@pytest.mark.parametrize(("asked", "told"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")])
def test_threads_of_the_command_line_wait_passively(asked: dict[str, str], told: str) -> None:
    """OpenMP itself says what it has understood, on stderr when PyTorch loads it. A user's own choice stands."""
    env = {**os.environ, **asked, "OMP_DISPLAY_ENV": "true"}
    code = "import sys\nfrom remask.cli import main\nsys.argv = ['x', 'generate', '--help']\n"
    code += "try:\n    main()\nexcept SystemExit:\n    import torch"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert f"OMP_WAIT_POLICY = '{told}'" in done.stderr, done.stderr[-2000:]


def test_it_is_too_late_once_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    for name in cpu.PASSIVE:
        monkeypatch.delenv(name, raising=False)
    assert not cpu.wait_passively()
    assert not os.environ.keys() & cpu.PASSIVE.keys()
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert cpu.wait_passively()


KIB = {"proc/meminfo": "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    9000000 kB"}
MEMORY: dict[str, tuple[dict[str, str], tuple[int, int]]] = {
    "no groups": ({}, (16_384_000_000, 9_216_000_000)),
    "version 2": (
        groups(
            "0::/a/b",
            {
                "a/memory.max": "4000000000",
                "a/memory.current": "1000000000",
                "a/b/memory.max": "max",
                "a/b/memory.current": "5",
            },
        ),
        (4_000_000_000, 3_000_000_000),
    ),
    "version 2, and files are held": (
        groups(
            "0::/",
            {
                "memory.max": "4000000000",
                "memory.current": "3900000000",
                "memory.stat": "anon 5\ninactive_file 3000000000\ntotal_inactive_file 7",
            },
        ),
        (4_000_000_000, 3_100_000_000),
    ),
    "more than there is": (
        groups("0::/", {"memory.max": "90000000000", "memory.current": "1"}),
        (16_384_000_000, 9_216_000_000),
    ),
    "version 1, and little is free": (
        groups(
            "4:memory:/x",
            {"memory/memory.limit_in_bytes": "12000000000", "memory/memory.usage_in_bytes": "12500000000"},
        ),
        (12_000_000_000, 0),
    ),
    "version 1, and files are held": (
        groups(
            "4:memory:/x",
            {
                "memory/memory.limit_in_bytes": "4000000000",
                "memory/memory.usage_in_bytes": "3900000000",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 3000000000",
            },
        ),
        (4_000_000_000, 3_100_000_000),
    ),
    "a limit of addresses": (
        {
            "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\nMax address space  3000000000  unlimited  bytes",
            "proc/self/status": "Name:\tpython\nVmPeak:\t 1900000 kB\nVmSize:\t 1000000 kB",
        },
        (3_000_000_000, 1_976_000_000),
    ),
    "no limit of addresses": (
        {"proc/self/limits": "Max address space  unlimited  unlimited  bytes", "proc/self/status": "VmSize:\t 9 kB"},
        (16_384_000_000, 9_216_000_000),
    ),
}


@pytest.mark.parametrize(("files", "expected"), MEMORY.values(), ids=MEMORY)
def test_memory_is_the_least_that_anything_allows(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, int]
) -> None:
    assert cpu.memory(write(tmp_path, KIB | files)) == expected


def test_a_system_that_does_not_tell_its_memory(tmp_path: Path) -> None:
    assert cpu.memory(tmp_path) is None
    assert cpu.memory(write(tmp_path, {"proc/meminfo": "MemTotal: 5 kB"})) is None
