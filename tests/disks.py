"""Full disks for tests."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, pages: int) -> Iterator[str]:
    """Make `folder` hold so many pages of 4 KiB, and give the reason that a write has which does not fit.

    It is a file system of its own where the tests may mount one. Elsewhere no file may grow larger than that.
    """
    folder.mkdir()
    size = f"size={pages * 4}k"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            yield "No space left on device"
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (pages * 4096, before[1]))
    try:
        yield "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
