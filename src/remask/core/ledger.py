"""The ledger: replays plans on the host and refuses one that reads what was never written."""

import numpy as np

from remask.core.plan import Plan, PrefixHit
from remask.errors import PlanError

UNWRITTEN = -2
LEASED = -1


class Ledger:
    """Step at which each K/V row was last written, int32 [layers, length]; `LEASED` for rows lent by the store.

    One ledger belongs to one canvas. `apply` is called before a plan runs, so a bad plan never reaches the device.
    """

    def __init__(self, layers: int, length: int, prefix: PrefixHit | None) -> None:
        self.written = np.full((layers, length), UNWRITTEN, dtype=np.int32)
        self.prefix = prefix
        if prefix is not None:
            self.written[: prefix.boundary, : prefix.length] = LEASED
        self.step = -1

    def apply(self, plan: Plan) -> None:
        """Record `plan` as the next step.

        Raises `PlanError`, and records nothing, where the plan does not fit the canvas, writes leased rows, attends to
        K/V that were never written, or restores a row that has no boundary state.
        """
        layers, length = self.written.shape
        plan.check(length)
        if plan.layers != layers:
            raise PlanError(f"a plan of {plan.layers} layers for a model of {layers}")
        written = self.written.copy()
        live = np.ones(length, dtype=np.bool_)  # before layer 0 every row can be embedded
        for span in plan.spans:
            self._check_restored(span.layers.start, span.rows & ~live)
            rows = span.computed if span.frozen is None else span.computed & ~span.frozen
            part = written[span.layers.start : span.layers.stop]
            cached = span.rows & ~span.computed
            if (part[:, cached] < 0).any():
                raise PlanError(f"layers {span.layers}: rows add cached outputs that were never computed")
            if (part[:, rows] == LEASED).any():
                raise PlanError(f"layers {span.layers}: leased rows are read-only; freeze them or leave them out")
            part[:, rows] = self.step + 1
            seen = part[:, : plan.reach(span.computed | (span.rows if span.pick else False))]
            if (seen == UNWRITTEN).any():
                layer, position = np.argwhere(seen == UNWRITTEN)[0]
                raise PlanError(
                    f"layer {span.layers.start + layer} attends to position {position}, whose K/V were never written"
                )
            live = span.rows
        self.written = written
        self.step += 1

    def _check_restored(self, layer: int, rows: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        if not rows.any():
            return
        first, last = np.flatnonzero(rows)[[0, -1]].tolist()
        if last - first + 1 != rows.sum():
            raise PlanError(f"the rows that join at layer {layer} are not one run of positions")
        if self.prefix is None or layer != self.prefix.boundary or last >= self.prefix.length:
            raise PlanError(f"position {last} joins at layer {layer}, where no boundary state is lent")
