"""The ledger replays plans on the host. It refuses a plan that reads K/V which were never written."""

import numpy as np

from remask.core.plan import Mask, Plan, PrefixHit
from remask.errors import PlanError

UNWRITTEN = -2
LEASED = -1


class Ledger:
    """Step at which each K/V row was last written, int32 [layers, length]; `LEASED` for rows lent by the store.

    One ledger belongs to one canvas. `apply` is called before a plan runs, so a bad plan never reaches the device.
    """

    def __init__(self, layers: int, length: int, prefix: PrefixHit | None) -> None:
        self.written = np.full((layers, length), UNWRITTEN, dtype=np.int32)
        self.kept = np.zeros((layers, length), dtype=np.bool_)  # rows whose input to a layer is kept
        self.prefix = prefix
        if prefix is not None:
            self.written[: prefix.layers, : prefix.length] = LEASED
        self.step = -1
        self._before = (self.written, self.kept)

    def apply(self, plan: Plan) -> None:
        """Record `plan` as the next step.

        Raises `PlanError`, and records nothing, where the plan does not fit the canvas, writes leased rows, attends to
        K/V that were never written, or restores a row that has no boundary state. A plan that watches attention is
        refused too where the hidden states of a row are not kept, because it could not refresh that row.
        """
        layers, length = self.written.shape
        plan.check(length)
        if plan.layers != layers:
            raise PlanError(f"a plan of {plan.layers} layers for a model of {layers}")
        written, kept = self.written.copy(), self.kept.copy()
        live = np.ones(length, dtype=np.bool_)  # before layer 0 every row can be embedded
        for span in plan.spans:
            self._check_restored(span.layers.start, span.rows & ~live)
            if span.save is not None:
                kept[span.layers.start] |= span.save
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
        if plan.watch is not None and not kept[1:].all():
            layer, position = np.argwhere(~kept[1:])[0]
            raise PlanError(f"attention is watched, but of position {position} no input to layer {layer + 1} is kept")
        self._before = (self.written, self.kept)
        self.written, self.kept = written, kept
        self.step += 1

    def revise(self, plan: Plan) -> None:
        """Record `plan` in place of the last plan, which it grew out of. Raises `PlanError` as `apply` does."""
        recorded = (self.written, self.kept)
        self.written, self.kept = self._before
        self.step -= 1
        try:
            self.apply(plan)
        except PlanError:
            self.written, self.kept = recorded
            self.step += 1
            raise

    def _check_restored(self, layer: int, rows: Mask) -> None:
        missing = rows & ~self.kept[layer]
        if self.prefix is not None and layer == self.prefix.boundary:
            missing[: self.prefix.length] = False
        if missing.any():
            last = np.flatnonzero(missing)[-1]
            raise PlanError(f"position {last} joins at layer {layer}, where no boundary state is lent or kept")
