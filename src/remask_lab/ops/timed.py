"""An engine whose operations are timed. An engine's own know nothing of it and pay nothing for it."""

from remask.engine.engine import Engine
from remask.observe import SECTIONS, run_in_sections
from remask_lab.ops.clock import Clock

REST = "rest"  # planning, scheduling, embedding, residuals, and rows carried or restored between stages
OPERATIONS = (*SECTIONS, REST)


def timed(engine: Engine) -> Clock:
    """The clock of `engine`, whose operations are timed from now on."""
    clock = Clock(engine.model.device, REST)
    run_in_sections(engine, clock.running)
    return clock
