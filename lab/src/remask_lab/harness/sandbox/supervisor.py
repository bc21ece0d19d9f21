"""The program between the evaluation and the candidate: builds the confinement and leaves no process behind.

It never runs generated code itself. It ends the candidate, with everything that the candidate started, when the
candidate ends, when it gets SIGTERM, and when the evaluation ends. In the last case it deletes the temporary folder
too. What it writes on standard output is the reason for which it ended the candidate.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from remask_lab.harness.sandbox import linux
from remask_lab.harness.sandbox.limits import limit_resources

NOT_BUILT: Final = 125
"""Exit status where the confinement could not be built; the reason is on standard output."""

TMP_MEGABYTES: Final = 64
_INTERVAL_S: Final = 0.05  # between two looks at the processes and their memory
_SWEEP_S: Final = 5.0
_PAGE_BYTES: Final = resource.getpagesize()
_ON_LINUX: Final = sys.platform == "linux"


def main() -> None:
    """Supervise the job that is JSON on standard input. Does not return."""
    job = json.load(sys.stdin)
    os.lseek(0, 0, os.SEEK_SET)  # bubblewrap's program reads it again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    if _ON_LINUX:
        linux.end_with_parent(signal.SIGTERM)
        linux.adopt_orphans()
    if os.getppid() != job["parent"]:
        os._exit(NOT_BUILT)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        _guarded(job, _become_candidate)
    if _ON_LINUX:
        linux.hide_from_peers()  # the child must not be hidden: only then may it set up its namespaces
    os.close(job["link"])  # the judge reads its end once every candidate has closed this one
    status, reason = _watch(child, job)
    if not _sweep(child, job):
        status, reason = NOT_BUILT, "processes of the generated code could not be ended"
    if os.getppid() != job["parent"]:
        remove(job["folder"])
    _report(reason)
    os._exit(status)


def remove(folder: str) -> None:
    """Delete a folder whatever a program has left in it: closed folders, links, or any depth."""
    for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)


def _watch(child: int, job: dict[str, Any]) -> tuple[int, str]:
    """Wait for the child's end, a request to end it, or for more processes or memory than the job may have."""
    while True:
        if _pause() or os.getppid() != job["parent"]:
            return 0, ""
        status = _reap(child)
        if status is not None:
            return status, ""
        if job["cgroup"] is None and _ON_LINUX:
            processes = list(_descendants(os.getpid()))
            if len(processes) > job["processes"] + job["helpers"]:
                return 1, f"it started more than {job['processes']} processes"
            if sum(map(_private_bytes, processes)) > job["megabytes"] * 2**20:
                return 1, f"its processes took more than {job['megabytes']} MiB of memory together"


def _pause() -> bool:
    """Wait until a child has ended, or a short while. Whether this process is to end."""
    if sys.platform == "linux":
        got = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, _INTERVAL_S)
        return got is not None and got.si_signo == signal.SIGTERM
    time.sleep(_INTERVAL_S)
    return signal.SIGTERM in signal.sigpending()


def _reap(child: int) -> int | None:
    """Take the status of every process that has ended; the child's, if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == child:
                found = _exit_status(ended[1])
    return found


def _sweep(child: int, job: dict[str, Any]) -> bool:
    """End everything that is left below this process. Whether all of it is gone."""
    if job["cgroup"] is not None:
        with suppress(OSError):
            (Path(job["cgroup"]) / "cgroup.kill").write_text("1")
    if not _ON_LINUX:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return True
    until = time.monotonic() + _SWEEP_S
    while processes := list(_descendants(os.getpid())):
        if job["uid"] is not None:
            _kill_user(job["uid"])
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _reap(child)
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def _kill_user(uid: int) -> None:
    """End all processes of a user that this run alone has, at once: none can start another one meanwhile."""
    killer = os.fork()
    if killer == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def _descendants(root: int) -> Iterator[int]:
    """Process ids below `root`, in no order."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                # The name of a program, in brackets, may hold spaces and brackets.
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    left = [root]
    while left:
        below = children.get(left.pop(), [])
        yield from below
        left += below


def _private_bytes(process: int) -> int:
    """Memory of a process that is no file's; pages that a fork shares count for each process."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_bytes().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _become_candidate(job: dict[str, Any]) -> None:
    """Enter the confinement and run the generated code. Does not return."""
    os.setsid()
    if job["cgroup"] is not None:
        (Path(job["cgroup"]) / "cgroup.procs").write_text("0")
    if job["mode"] == "bubblewrap":
        if job["uid"] is not None:
            os.setgroups([])
            os.setresgid(job["uid"], job["uid"], job["uid"])
            os.setresuid(job["uid"], job["uid"], job["uid"])
        linux.end_with_parent(signal.SIGKILL)
        os.execv(job["command"][0], job["command"])
    # Imported while its file can still be seen.
    from remask_lab.harness.sandbox.candidate import serve

    sys.path.remove(job["root"])
    if job["mode"] == "namespaces":
        linux.enter_namespaces()
        linux.enter_root(job["folder"], job["paths"], TMP_MEGABYTES)
        os.environ["TMPDIR"] = linux.WORK
        _wait_unless_child(job)  # the first process of the new namespace of process ids
        _wait_unless_child(job)  # the candidate; the first process ends when this one does, and all others with it
    else:
        os.chdir(job["folder"])
        os.environ["TMPDIR"] = job["folder"]
    if _ON_LINUX:
        linux.drop_rights(job["uid"])
        linux.end_with_parent(signal.SIGKILL)
    limit_resources(job)
    serve(job["code"], job["link"])


def _wait_unless_child(job: dict[str, Any]) -> None:
    """Fork; return in the child, which ends with its parent. The parent waits for it and ends with its status."""
    child = os.fork()
    if child == 0:
        linux.end_with_parent(signal.SIGKILL)
        return
    os.close(job["link"])
    linux.end_with_parent(signal.SIGKILL)
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(_exit_status(status))


def _guarded(job: dict[str, Any], step: Any) -> NoReturn:
    try:
        step(job)
    except BaseException as error:
        _report(f"{type(error).__name__}: {error}")
    os._exit(NOT_BUILT)


def _report(reason: str) -> None:
    os.write(1, reason.encode("utf-8", "replace"))


def _exit_status(status: int) -> int:
    """The status as a shell gives it: 128 and the number for a process that a signal ended."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
