"""The calls of Linux that confine a process and that Python 3.11 does not offer."""

import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38

_NEW_MOUNTS: Final = 0x00020000
_NEW_HOSTNAME: Final = 0x04000000
_NEW_IPC: Final = 0x08000000
_NEW_USERS: Final = 0x10000000
_NEW_PROCESSES: Final = 0x20000000
_NEW_NETWORK: Final = 0x40000000

_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MS_BIND: Final = 4096
_MS_REC: Final = 16384
_MS_PRIVATE: Final = 1 << 18
_MNT_DETACH: Final = 2

_SYS_MOUNT_SETATTR: Final = 442  # the same number on every architecture
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY_NOSUID: Final = 1 | 2

_CAPABILITY_VERSION_3: Final = 0x20080522
WORK: Final = "/generated"  # where generated code begins; no root is built where an interpreter is below it
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process the signal when its parent ends. A change of user takes this back."""
    _call("prctl", _PR_SET_PDEATHSIG, number, 0, 0, 0)


def hide_from_peers() -> None:
    """Keep other processes of the same user from tracing this one and from opening its descriptors."""
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def drop_rights(uid: int | None) -> None:
    """Become user `uid` (None: stay the same), without capabilities or a way to get any."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def enter_namespaces() -> None:
    """Leave the machine's network, mounts, hostname and IPC. Later children have process ids of their own.

    An ordinary user enters a namespace of users too, which is what gives the right to the others.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEW_MOUNTS | _NEW_HOSTNAME | _NEW_IPC | _NEW_PROCESSES | _NEW_NETWORK
    _call("unshare", flags if uid == 0 else flags | _NEW_USERS)
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def enter_root(folder: str, paths: Sequence[tuple[str, str | None]], megabytes: int) -> None:
    """Make a new root of `paths`, read-only, a few devices, /tmp and an empty folder `WORK`, and enter the latter.

    Args:
        folder: an empty folder, which the new root covers in this mount namespace alone.
        paths: what is there; a path with its target is made as a symbolic link.
        megabytes: size of the file system in memory that holds /tmp and `WORK`.
    """
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call(
        "mount", b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, f"size={megabytes}m,mode=755".encode()
    )
    for path, target in paths:
        place = Path(folder + path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if target is not None:
            place.symlink_to(target)
        elif Path(path).is_dir():
            place.mkdir(exist_ok=True)
            _bind(path, place)
        else:
            place.touch()
            _bind(path, place)
    (Path(folder) / "dev").mkdir()
    for name in _DEVICES:
        place = Path(folder) / "dev" / name
        place.touch()
        _call("mount", f"/dev/{name}".encode(), os.fsencode(place), None, _MS_BIND, None)
    for writable in ("/tmp", WORK):
        place = Path(folder + writable)
        place.mkdir(exist_ok=writable != WORK)
        place.chmod(0o1777)
    os.chdir(folder)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(WORK)


def _bind(path: str, place: Path) -> None:
    _call("mount", os.fsencode(path), os.fsencode(place), None, _MS_BIND | _MS_REC, None)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY_NOSUID, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(place), _AT_RECURSIVE, attributes, size)


def _call(name: str, *args: object) -> None:
    """Call a function of the C library. Raises `OSError` where it fails or is missing."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(f"the C library has no {name}")
    function.restype = ctypes.c_long
    widened = [ctypes.c_ulong(arg) if isinstance(arg, int) and arg >= 0 else arg for arg in args]
    if function(*widened) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
