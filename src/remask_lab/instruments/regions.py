"""Regions of a canvas, as seen from the block that is denoised."""

import numpy as np
from numpy.typing import NDArray

REGIONS = ("bias", "prompt", "rest_past", "previous", "current", "next", "rest_future", "trailing")
SINK = REGIONS.index("bias")  # the learned key of models that have one: it stands at no position

Regions = NDArray[np.int8]


def regions(length: int, prompt: int, end: int, start: int, block: int) -> Regions:
    """The region of every position of a canvas, int8 [length], as an index into `REGIONS`.

    The response is the positions from `prompt` to `end`, the current block the `block` positions from `start` on. What
    follows the last block that holds a response position is trailing. A prompt that reaches into the current block is
    current there, as it is computed with the block.
    """
    places = np.arange(length)
    distance = (places - start) // block
    region = np.full(length, REGIONS.index("rest_future"), dtype=np.int8)
    region[distance < -1] = REGIONS.index("rest_past")
    for name, away in (("previous", -1), ("next", 1)):
        region[distance == away] = REGIONS.index(name)
    region[places < prompt] = REGIONS.index("prompt")
    region[distance == 0] = REGIONS.index("current")
    region[distance > (end - 1 - start) // block] = REGIONS.index("trailing")
    return region


def words(region: str) -> str:
    """The name of a region as text."""
    return region.replace("_", " ")
