"""One canvas' part in a stage of a pass."""

from dataclasses import dataclass

from remask.engine.canvas_state import CanvasState, SlotTable
from remask.model.runs import Index
from remask.plan.spans import Span


@dataclass(slots=True)  # not frozen, as one is made for each canvas of each stage
class StageRows:
    """The rows of one canvas in one stage."""

    branch: CanvasState
    span: Span
    table: SlotTable
    positions: Index
    rows: slice  # among the stage's flat rows
    sees: Index | None  # how many leading positions of the canvas each row attends to; None: all
