"""A pytest plugin that proves that a session leaves nothing behind: no file, no process and no listening socket.

A session has a folder of its own for temporary files (`TMPDIR`), so whatever is in it at the end was left by a test or
by a process that a test started; other users of the machine's temporary folder do not matter. Pytest's own folders stay
where they are. Caches of libraries, which would stand in the user's home, are in the folder too, and go with it. New
files of the checkout are found by comparison. Processes and sockets are found where Linux tells of them (`/proc`).

Under pytest-xdist each worker looks at what is its own, and the controller at all.
"""

import contextlib
import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

GRACE_S = 20.0  # for processes that have been told to end
TICK_S = 0.02  # a file may be so much older than the clock says
CACHES = {
    "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis",
    "MPLCONFIGDIR": "matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "xdg",
    "XDG_CONFIG_HOME": "config",
}
# What tools keep in a checkout, whichever command is run.
OTHERS = {".git", ".venv", ".venv-clients", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__"}
DRIVERS = "@cuda-uvmfd-"  # listening sockets of CUDA's driver, which last as long as the process
_PROC = Path("/proc")

_lasting: list[tempfile.TemporaryDirectory[str]] = []


def lasting_folder() -> Path:
    """A folder for what many tests of a process share, such as files of a cached model. It goes with the session."""
    _lasting.append(tempfile.TemporaryDirectory(prefix="lasting-"))
    return Path(_lasting[-1].name)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Watch(config), "leftovers-watch")


class _Watch:
    """What a session, or one of its workers, began with and has left."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._worker = config, hasattr(config, "workerinput")
        self._root, self._before = config.rootpath, tempfile.tempdir
        self._environment = {name: os.environ.get(name) for name in ("TMPDIR", "PYTEST_DEBUG_TEMPROOT", *CACHES)}
        outer = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="remask-"))
        self.folder.chmod(0o755)  # confined code may run as another user
        self._own = {"caches"}
        if not self._worker:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outer)
            for name, part in CACHES.items():
                os.environ[name] = str(self.folder / "caches" / part)
                Path(os.environ[name]).mkdir(parents=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        self._files = set() if self._worker else set(self._checkout())
        self._sockets = set(_listening([os.getpid()]))
        self._children = _descendants(os.getpid())
        self._seen: set[object] = set(self._own)
        self._origins: dict[object, str] = {}
        self._times: list[tuple[float, float, str]] = []
        self.left: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Remember what came with a test; sockets with a file of tests, as looking for them takes longer."""
        found = yield
        self._note({*os.listdir(self.folder), *children(os.getpid())}, item.nodeid)
        if nextitem is None or nextitem.path != item.path:
            self._note(set(_listening([os.getpid()])), item.nodeid.partition("::")[0])
        return found

    def _note(self, here: set[object], origin: str) -> None:
        self._origins.update(dict.fromkeys(here - self._seen, origin))
        self._seen |= here

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember when a test ran, wherever it did."""
        if not self._worker:
            self._times.append((report.start, report.stop, report.nodeid))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of pytest-xdist has found."""
        self.left += getattr(node, "workeroutput", {}).get("leftovers", [])

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Look at what is left once all fixtures have ended. Anything fails the session."""
        found = yield
        while _lasting:
            _lasting.pop().cleanup()
        gc.unfreeze()  # importing a command freezes garbage too, such as a model with its helper processes
        gc.collect()
        self.left += [*self._left_processes(), *self._left_sockets(), *self._left_files()]
        if self._worker:
            self._config.workeroutput["leftovers"] = self.left  # type: ignore[attr-defined]
        elif self.left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name what was left, and as far as it is known by which test."""
        if self.left:
            terminalreporter.write_sep("=", "left behind, which fails the session", red=True)
            for line in self.left:
                terminalreporter.write_line(line)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Remove the folder, and give back the environment."""
        shutil.rmtree(self.folder, ignore_errors=True)
        tempfile.tempdir = self._before
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _left_processes(self) -> Iterator[str]:
        """Children, and whatever else has got the session's folder from its parent: also what has left them."""
        end = time.monotonic() + GRACE_S
        while (left := self._processes()) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in sorted(left):
            words = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
            yield f"process {pid} ({words[:200]}){self._by(pid)}"

    def _processes(self) -> set[int]:
        own = {os.getpid(), *_ancestors(), getattr(resource_tracker._resource_tracker, "_pid", None)}
        mark = f"TMPDIR={self.folder}".encode()
        marked = {pid for pid in _pids() if any(each.startswith(mark) for each in _read(pid, "environ").split(b"\0"))}
        left = (_descendants(os.getpid()) | marked) - self._children - own
        return {pid for pid in left if _state(pid) not in "ZX"}

    def _left_sockets(self) -> Iterator[str]:
        found = _listening([os.getpid(), *_descendants(os.getpid())])
        for each in sorted(set(found) - self._sockets):
            yield f"listening socket {found[each]}{self._by(each)}"

    def _left_files(self) -> Iterator[str]:
        for name in sorted(set(os.listdir(self.folder)) - self._own):
            path = self.folder / name
            kind = "folder" if path.is_dir() and not path.is_symlink() else "file"
            held = f", which holds {', '.join(sorted(os.listdir(path))[:5]) or 'nothing'}" if kind == "folder" else ""
            yield f"temporary {kind} {name}{held}{self._by(name) or self._at(path)}"
        if not self._worker:
            for name in sorted(_untracked(self._root, set(self._checkout()) - self._files)):
                yield f"file of the checkout {name}{self._at(self._root / name)}"

    def _checkout(self) -> Iterator[str]:
        """The files of the checkout by their names below it, but those of `OTHERS` and of pytest."""
        given = self._config.option.basetemp
        own = None if given is None else os.path.abspath(given)
        for folder, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if name not in OTHERS and os.path.join(folder, name) != own]
            for name in files:
                if not name.startswith(".coverage"):
                    yield os.path.relpath(os.path.join(folder, name), self._root)

    def _by(self, each: object) -> str:
        """The test after which something was there for the first time."""
        return f", first seen after {self._origins[each]}" if each in self._origins else ""

    def _at(self, path: Path) -> str:
        """The tests that ran when a file was written last."""
        when = path.lstat().st_mtime
        tests = sorted({name for start, stop, name in self._times if start - TICK_S <= when <= stop})
        return f", written while {' and '.join(tests)} ran" if tests else ""


def _untracked(root: Path, names: set[str]) -> set[str]:
    """Those of some new files that git does not know either: another branch may have been checked out meanwhile."""
    if not names or not (root / ".git").exists() or shutil.which("git") is None:
        return names
    words = ["git", "-C", str(root), "ls-files", "-z"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False)
    return names - set(listed.stdout.split("\0"))


def _read(pid: int, name: str) -> bytes:
    """A file of a process; nothing where it has ended or belongs to somebody else."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _state(pid: int) -> str:
    """The letter of a process' state; X where it has gone."""
    return (_read(pid, "stat").rpartition(b")")[2].split() or [b"X"])[0].decode()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdecimal()] if _PROC.is_dir() else []


def children(pid: int) -> set[int]:
    """Processes that one has started and that still are."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(_PROC / str(pid) / "task"):
            found |= set(map(int, _read(pid, f"task/{task}/children").split()))
    return found


def _descendants(pid: int) -> set[int]:
    found = children(pid)
    return found.union(*(_descendants(each) for each in found))


def _ancestors() -> Iterator[int]:
    """The processes that this one was started by: a worker's controller has its folder for a part of its own."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        stat = _read(pid, "stat").rpartition(b")")[2].split()
        pid = int(stat[1]) if len(stat) > 1 else 0


def _listening(pids: list[int]) -> dict[str, str]:
    """The listening sockets of processes: what Linux calls them in the processes' descriptors, and their addresses."""
    sockets = set().union(*map(_sockets, pids))
    addresses: dict[str, str] = {}
    if not sockets:
        return addresses
    for kind in ("tcp", "tcp6"):
        for line in _read_lines(_PROC / "net" / kind):
            if line[3] == "0A":
                addresses[f"socket:[{line[9]}]"] = f"at port {int(line[1].rpartition(':')[2], 16)}"
    for line in _read_lines(_PROC / "net" / "unix"):
        if int(line[3], 16) & 0x10000 and not (len(line) > 7 and line[7].startswith(DRIVERS)):
            addresses[f"socket:[{line[6]}]"] = f"at {line[7] if len(line) > 7 else 'no path'}"
    return {name: addresses[name] for name in sockets & addresses.keys()}


def _sockets(pid: int) -> set[str]:
    """The sockets of a process, as its descriptors name them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(_PROC / str(pid) / "fd" / name))
    return {name for name in found if name.startswith("socket:")}


def _read_lines(path: Path) -> list[list[str]]:
    """The words of the lines of a table of sockets, without its head."""
    try:
        return [line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines()[1:]]
    except OSError:
        return []
