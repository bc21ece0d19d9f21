"""Returns free memory of the C library to the system."""

import ctypes
import sys


def trim_memory() -> bool:
    """Return free memory to the system. True where there was some.

    glibc keeps memory that large passes have freed. Other C libraries have no such call, and nothing is done there.
    """
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
