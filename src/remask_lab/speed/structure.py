"""What structured outputs add to a step of a large model: measured on the host, counted on the device."""

import argparse
import random
import string
from functools import partial
from typing import Any

import numpy as np

from remask.answers.structured import Structures
from remask.families import preset
from remask.plan.canvas import Canvas
from remask.readers.base import Predicted
from remask.readers.constraint import ConstrainedHole, Constraint
from remask.request.forms import StructuredOutputs
from remask_lab.records.machine import commit
from remask_lab.speed.command import in_turns, thread_seconds

H200_BYTES_S, H200_FLOPS = 4.8e12, 989e12
"""Memory bandwidth of an H200, and its dense bfloat16 operations, as NVIDIA states them."""
LOGIT_BYTES = 4
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "on": {"type": "boolean"}, "legs": {"type": "integer"}},
    "required": ["name", "on", "legs"],
}
PASSES = 12
"""Times that the scores of a constraint go over the logits: filters, two scatters, a gather, a log-softmax."""


def structure(args: argparse.Namespace) -> dict[str, Any]:
    """What structured outputs add to a step, beside the step of an 8B model.

    The host's part, the best path through a block, is measured: processor time of one thread. The device's part, the
    best token of each class in every row, is counted: its passes over the logits, in bytes at an H200's bandwidth. Both
    stand beside the step of an 8B model in bfloat16 at the same bandwidth, which reads its weights and writes its
    logits once, the least that a step can take; and beside one that computes a whole canvas, by its operations. The
    schema has some 50 states over a vocabulary as large as LLaDA's, whose pieces are drawn.
    """
    constraint = Structures(tokens_of(args.vocab), [args.vocab - 1]).compiled(StructuredOutputs(json=SCHEMA))
    automaton = constraint.automaton
    host = _host_seconds(constraint, args.block, args.turns)
    parameters = preset(args.model).parameters
    logits = args.block * args.vocab * LOGIT_BYTES
    step = (2 * parameters + logits) / H200_BYTES_S
    whole = max(step, 2 * parameters * args.canvas / H200_FLOPS)
    device = PASSES * logits / H200_BYTES_S
    return {
        "commit": commit(),
        "states": automaton.states,
        "classes": automaton.labels,
        "transitions": automaton.transitions,
        "block": args.block,
        "vocab": args.vocab,
        "host_cpu_ms": 1e3 * host,
        "device_ms_by_bytes": 1e3 * device,
        "step_ms_by_bytes": 1e3 * step,
        "share_of_step": (host + device) / step,
        "whole_canvas": args.canvas,
        "whole_step_ms": 1e3 * whole,
        "share_of_whole_step": (host + device) / whole,
    }


def tokens_of(size: int) -> list[bytes | None]:
    """A vocabulary as a tokenizer learns it: bytes, numbers, JSON's punctuation, and pieces of words."""
    rng = random.Random(0)
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    found |= dict.fromkeys(str(number).encode() for number in range(1000))
    marks = ('{"', '":', '": ', '": "', '",', '", "', '"}', "},", ", ", "true", "false", "null", '"]', "[", "]}")
    found |= dict.fromkeys(mark.encode() for mark in marks)
    while len(found) < size - 1:
        word = "".join(rng.choices(string.ascii_letters, weights=[5] * 26 + [1] * 26, k=rng.randint(2, 9)))
        found[rng.choice(["", " ", " ", "_"]).encode() + word.encode() + rng.choice([b"", b"", b"", b'"', b","])] = None
    return [*found, None]


def _host_seconds(constraint: Constraint, block: int, turns: int) -> float:
    """Median processor time of `ConstrainedHole.choose` over a block of masks, in seconds."""
    count, rng = constraint.table.count, np.random.default_rng(1)
    automaton = constraint.automaton
    left = next(length for length in range(block, block + 256) if automaton.alive(length)[automaton.start])
    canvas = Canvas.masked([1, 2, 3], left, 0)
    positions = np.arange(3, 3 + block)
    numbers = rng.standard_normal((4 * count, block)).astype(np.float32)
    found = Predicted(positions, np.zeros_like(positions), np.zeros(block, dtype=np.float32))
    hole = ConstrainedHole(constraint, canvas, range(3, 3 + left))
    hole.block = range(3, 3 + block)
    times = in_turns({"choice": partial(hole.choose, found, numbers)}, turns, thread_seconds)
    return float(np.median(times["choice"]))
