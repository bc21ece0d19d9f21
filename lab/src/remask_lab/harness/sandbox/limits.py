"""The limits that candidate and judge set for themselves."""

import resource
from typing import Any, Final

_FILE_MEGABYTES: Final = 16
_OPEN_FILES: Final = 128


def limit_resources(job: dict[str, Any]) -> None:
    """Set the job's limits for each process, and for the number of processes where the job has a `process_limit`.

    A hard limit that is lower already stays.
    """
    limits = {
        "AS": job["megabytes"] * 2**20,
        "CPU": int(job["seconds"]) + 1,
        "FSIZE": _FILE_MEGABYTES * 2**20,
        "NOFILE": _OPEN_FILES,
        "CORE": 0,
    }
    if job.get("process_limit") is not None:
        limits["NPROC"] = job["process_limit"]
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
