"""Memory that is free and that the C library keeps."""

import ctypes
import sys


def trim_memory() -> bool:
    """Give free memory back to the system, and say whether any was.

    glibc keeps what large passes have left free, in case that it is asked for again. Other C libraries have no such
    call, and there nothing is done.
    """
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
