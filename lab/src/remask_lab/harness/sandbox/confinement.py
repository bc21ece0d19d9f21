"""What the machine offers for confining generated code, and how a confined process is started."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from remask_lab.harness.sandbox.linux import WORK
from remask_lab.harness.sandbox.supervisor import TMP_MEGABYTES

Mode = Literal["bubblewrap", "namespaces", "process"]

_ROOT: Final = str(Path(__file__).parents[3])  # what `remask_lab` is imported from
_INSIDE: Final = "/sandbox"  # the same within bubblewrap
_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TMPDIR": WORK,
    # Libraries that start a thread for every core would meet the limit on processes.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/nix/store")
# A range of user ids that no distribution gives to users, services or containers.
_FIRST_UID: Final = 0x70000000
_UIDS: Final = 2**27
# bubblewrap's own two processes, and those around a namespace, are below the supervisor too.
_HELPERS: Final = {"bubblewrap": 2, "namespaces": 2, "process": 0}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may take.

    Attributes:
        seconds: by the clock, from the start of its process; also of each process on a core.
        megabytes: MiB of memory: of each process, and of all together.
        processes: at most as many, threads included where the kernel counts them.
    """

    seconds: float = 10.0
    megabytes: int = 1024
    processes: int = 32


@dataclass(frozen=True, slots=True)
class Confinement:
    """One way to confine a program.

    Attributes:
        mode: "bubblewrap" and "namespaces" hide network, files and other processes; "process" sets limits alone.
        own_user: whether the program runs as a user id that nothing else has. Only root can offer that.
        cgroups: the folder in which control groups with limits on memory and processes can be made.
    """

    mode: Mode
    own_user: bool = False
    cgroups: Path | None = None

    def gaps(self) -> tuple[str, ...]:
        """What is not confined, each as one sentence."""
        found = []
        if self.mode == "process":
            user = "of a user id of its own" if self.own_user else f"of your user (id {os.geteuid()})"
            found += [
                "It can reach the network.",
                f"It can read and write files with the rights {user}, and leave files outside its temporary folder.",
            ]
            if not self.own_user:
                found.append(
                    "It can send signals to your other processes, this one included, and a program that aims at that "
                    "can outlive its limit."
                )
        if sys.platform != "linux":
            found.append("A process that it moves to another session outlives the limit: this is not Linux.")
        if self.cgroups is None:
            found.append(
                "The sum of its processes and of their memory is checked every 50 ms and not by the kernel, because "
                "there is no control group (version 2) with memory and pids that can be written."
            )
            if os.geteuid() == 0 and not self.own_user:
                found.append("The kernel does not limit the number of processes of root.")
        return (*found, "It shares the kernel with this machine.")

    def describe(self) -> str:
        """One paragraph: how generated code runs, and what is not confined."""
        hidden = "without network, other processes, and files but the system's programs and the interpreter's folders"
        how = {
            "bubblewrap": f"in namespaces made by bubblewrap, {hidden}",
            "namespaces": f"in namespaces, {hidden}",
            "process": "in a process with limits alone, because neither bubblewrap nor namespaces work here",
        }[self.mode]
        return f"Generated code runs {how}. Not confined: {' '.join(self.gaps())}"

    def start(self, code: str, link: int, folder: str, limits: Limits, report: IO[bytes]) -> "Candidate":
        """Start `code`, which answers on the descriptor `link`.

        Args:
            code: Python source.
            link: one end of a socket pair; the caller closes its copy.
            folder: an empty folder for the run, which the caller removes.
            limits: what it may take.
            report: where the supervisor writes why it ended the program, if it did.
        """
        uid = _FIRST_UID + secrets.randbelow(_UIDS) if self.own_user else None
        if uid is not None and self.mode == "process":
            os.chown(folder, uid, uid)
        cgroup = None if self.cgroups is None else make_cgroup(self.cgroups, limits)
        alone = uid is not None or (self.mode != "process" and _counts_by_namespace())
        job: dict[str, Any] = {
            "mode": self.mode,
            "code": code,
            "link": link,
            "folder": folder,
            "uid": uid,
            "cgroup": None if cgroup is None else str(cgroup),
            "seconds": limits.seconds,
            "megabytes": limits.megabytes,
            "processes": limits.processes,
            "helpers": _HELPERS[self.mode],
            "process_limit": _process_limit(limits.processes + _HELPERS[self.mode], alone),
            "paths": visible_paths() if self.mode == "namespaces" else [],
            "command": _bubblewrap_command() if self.mode == "bubblewrap" else [],
            "root": _ROOT,
        }
        return Candidate(start_program("supervisor", job, report, link), cgroup)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running candidate."""

    supervisor: "subprocess.Popen[bytes]"
    cgroup: Path | None

    def status(self, seconds: float) -> int | None:
        """Its exit status; None where it runs on after `seconds`."""
        try:
            return self.supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End all of its processes. Returns once they are gone."""
        if self.supervisor.poll() is None:
            self.supervisor.terminate()
            if self.status(10.0) is None:
                self.supervisor.kill()
                self.supervisor.wait()
        if self.cgroup is not None:
            with suppress(OSError):
                (self.cgroup / "cgroup.kill").write_text("1")
            with suppress(OSError):
                self.cgroup.rmdir()


def start_program(name: str, job: dict[str, Any], output: IO[bytes], link: int) -> "subprocess.Popen[bytes]":
    """Start one of this package's programs in a session of its own, with `job` as its standard input."""
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps({**job, "parent": os.getpid()}).encode())
        given.seek(0)
        return subprocess.Popen(
            _python(name, _ROOT),
            stdin=given,
            stdout=output,
            stderr=output if name == "supervisor" else subprocess.DEVNULL,
            cwd="/",
            env=_ENVIRONMENT,
            pass_fds=(link,),
            start_new_session=True,
        )


def choices() -> Sequence[Confinement]:
    """Ways to confine that may work here, the strictest first."""
    modes: list[Mode] = ["process"]
    if sys.platform == "linux":
        modes = ["bubblewrap", "namespaces", "process"] if shutil.which("bwrap") else ["namespaces", "process"]
    users = (True, False) if os.geteuid() == 0 and sys.platform == "linux" else (False,)
    cgroups = dict.fromkeys((writable_cgroups(), None))
    return [Confinement(mode, own_user, folder) for mode in modes for own_user in users for folder in cgroups]


def writable_cgroups() -> Path | None:
    """The folder of control groups, version 2, in which one with limits can be made; None without one."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    for fields in mounts:
        if fields[fields.index("-") + 1] == "cgroup2":
            place = Path(fields[4]) / own.lstrip("/")
            # A group that holds processes cannot limit groups below it, but its parent may be this user's too.
            for folder in dict.fromkeys((place, place.parent if own != "/" else place)):
                made = make_cgroup(folder, Limits())
                if made is not None:
                    made.rmdir()
                    return folder
    return None


def make_cgroup(folder: Path, limits: Limits) -> Path | None:
    """A control group with `limits` in `folder`; None where that cannot be made or has no such limits."""
    made = folder / f"remask-{secrets.token_hex(8)}"
    try:
        made.mkdir()
    except OSError:
        return None
    try:
        for name, value in (("memory.max", limits.megabytes * 2**20), ("pids.max", limits.processes + 4)):
            if not (made / name).exists():
                raise FileNotFoundError(name)
            (made / name).write_text(str(value))
        if (made / "memory.swap.max").exists():
            (made / "memory.swap.max").write_text("0")
    except OSError:
        with suppress(OSError):
            made.rmdir()
        return None
    return made


def visible_paths() -> list[tuple[str, str | None]]:
    """What a confined program sees: the interpreter, its packages and the system's programs; links with a target."""
    found: list[tuple[str, str | None]] = [
        (path, os.readlink(path) if Path(path).is_symlink() else None) for path in filter(os.path.lexists, _SYSTEM)
    ]
    installed = str(Path(sys.executable).resolve().parents[1])
    for path in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, installed, sys.prefix)):
        if not any(target is None and Path(path).is_relative_to(outer) for outer, target in found):
            found.append((path, None))
    return found


def _bubblewrap_command() -> list[str]:
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    command = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    room = ["--size", str(TMP_MEGABYTES * 2**20), "--tmpfs"]
    command += [*room, "/tmp", *room, WORK]  # before what may stand in /tmp
    for path, target in visible_paths():
        command += ["--ro-bind", path, path] if target is None else ["--symlink", target, path]
    package = "remask_lab/harness/sandbox"
    command += ["--dev", "/dev", "--ro-bind", f"{_ROOT}/{package}", f"{_INSIDE}/{package}"]
    return [*command, "--chdir", WORK, "--", *_python("candidate", _INSIDE)]


def _python(program: str, root: str) -> list[str]:
    start = f"import sys; sys.path.insert(0, {root!r}); from remask_lab.harness.sandbox.{program} import main; main()"
    return [sys.executable, "-I", "-c", start]


def _counts_by_namespace() -> bool:
    """Whether the kernel counts a user's processes apart in each namespace of users (Linux 5.14)."""
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1])) >= (5, 14)


def _process_limit(processes: int, alone: bool) -> int | None:
    """The kernel's limit on processes, which counts all of a user's, where the program is not `alone` in its count."""
    if sys.platform != "linux":
        return None
    if alone:
        return processes
    total = processes
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == os.getuid():
                total += len(os.listdir(entry / "task"))
    return total
