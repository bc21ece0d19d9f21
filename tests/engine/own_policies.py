"""Policies as another package might bring them: with a layer hook, and with a measure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from remask.denoising.rules import MARGIN
from remask.machine.transfers import fetch
from remask.plan import HookCost, LayerHook, Mask, OperationCost, Plan, Span, Spans, View, Widths
from remask.policies import CachePolicy, Schedule, Traits
from remask.policies.on_device import AttendingRows, Changed, DeviceHook


@dataclass(frozen=True, slots=True)
class Revive(LayerHook):
    """Makes all rows live from the layer `at` on (None: it does not), and reports to what position `rows` attend most.

    Attributes:
        rows: those whose attention in the last layer is read.
        at: the layer.
        revived: it has done so.
    """

    rows: Mask
    at: int | None
    revived: bool = False

    on_device = "tests.engine.own_policies:ReviveRows"
    revives = True

    def changes(self, spans: Spans) -> bool:  # noqa: ARG002
        return self.at is not None

    @property
    def masks(self) -> tuple[Mask, ...]:
        return (self.rows,)

    def check(self, spans: Spans) -> None:
        assert len(spans) == spans.layers

    def below(self, lead: Mask) -> Self:
        return replace(self, rows=self.rows & lead)

    def cost(self, widths: Widths, spans: Spans) -> HookCost:  # noqa: ARG002
        """Queries of the rows are projected again, in one layer."""
        w, rows, among = widths, int(self.rows.sum()), len(self.rows)
        cost = OperationCost(
            flops=2 * rows * w.queries * (w.hidden + among),
            kv_read=w.itemsize * among * w.keys,
            activations=w.itemsize * rows * (w.hidden + w.queries),
        )
        return HookCost(watch=cost, looks=1)


class ReviveRows(DeviceHook):
    def after(self, layer: int, plans: Sequence[Plan]) -> Changed:
        changed = {}
        for each in self.canvases:
            plan = plans[each.number]
            hook = plan.hook
            assert isinstance(hook, Revive)
            if hook.at == layer + 1 and not hook.revived:
                changed[each.number] = replace(plan.refreshed(hook.at), hook=replace(hook, revived=True))
        return changed

    def after_pass(self) -> None:
        asked = list[AttendingRows]()
        for each in self.canvases:
            assert isinstance(each.plan.hook, Revive)
            rows = np.flatnonzero(each.plan.hook.rows)
            asked.append(AttendingRows(each.branch, rows, len(rows)))
        last = self.canvases[0].plan.spans.layers - 1
        for asking, (mass, _) in zip(asked, self.attention(last, asked), strict=True):
            asking.branch.hook_output = int(fetch(mass.argmax()[None])[0])


@dataclass(frozen=True)
class Reviving(CachePolicy):
    """Computes the block, and the position that it attended to most; every `every` steps also all above layer `at`."""

    at: int = 2
    every: int = 2

    traits = Traits(schedule=Schedule("within_block"), keeps=frozenset({"inputs"}))

    def plan(self, view: View) -> Plan:
        rows = view.everything
        if view.step:
            rows = view.candidates | (view.settled == view.step - 1)
            rows[np.flatnonzero(view.candidates) - view.shift] = True
            rows[view.hook_output] = True
        spans = view.spans(("revive", rows.tobytes()), partial(self._layered, view, rows))
        hook = Revive(view.candidates, self.at if view.step % self.every else None)
        return Plan(spans, view.candidates, refreshes=view.step == 0, hook=hook)

    @staticmethod
    def _layered(view: View, rows: Mask) -> list[Span]:
        return [Span(range(i, i + 1), rows, save=rows if i else None) for i in range(view.layers)]


@dataclass(frozen=True)
class Measuring(CachePolicy):
    """Computes everything where the smallest margin of the last step was below `margin`, and else the block."""

    margin: float = 0.1

    traits = Traits(schedule=Schedule("within_block"), measure=MARGIN)

    def plan(self, view: View) -> Plan:
        margins = view.last_pass.measured
        if view.step == 0 or (margins is not None and len(margins) and margins.min() < self.margin):
            return Plan(view.over(0, view.length), view.candidates, refreshes=True)
        return Plan(view.over(max(0, view.block.start - view.shift), view.length), view.candidates)
