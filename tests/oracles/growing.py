"""A growing canvas: for each block a canvas of its own, on which all that is decoded is fixed."""

from collections.abc import Callable
from typing import Any

from tests.oracles.canvas import Decode

Line = dict[str, Any]


def stages(line: Line, decode: Callable[[Line], Decode | None]) -> list[tuple[Line, Decode]] | None:
    """The line of each block, and what it decodes to; None where `decode` has no answer to one.

    A block has `steps_per_block` steps. Blocks end with `max_tokens`, or with one that holds one of `stop_token_ids`.
    """
    sampling, found = line["sampling"], list[tuple[Line, Decode]]()
    decoded: list[int] = []
    while len(decoded) < sampling["max_tokens"]:
        size = min(sampling["block_length"], sampling["max_tokens"] - len(decoded))
        own = {name: value for name, value in sampling.items() if name not in ("steps_per_block", "order")}
        own["max_tokens"] = len(decoded) + size
        if "steps_per_block" in sampling:
            own["steps"] = sampling["steps_per_block"]
        if "order" in sampling:
            own["order"] = [sampling["order"][len(found)]]
        stage = {**line, "sampling": own, "template": [*decoded, *[None] * size]}
        expected = decode(stage)
        if expected is None:
            return None
        found.append((stage, expected))
        block = expected.output_ids[len(decoded) :]
        decoded = expected.output_ids
        if not set(block).isdisjoint(sampling.get("stop_token_ids", ())):
            break
    return found
