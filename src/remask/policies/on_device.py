"""Layer hooks on the device, between the layers of a pass. The hook of a plan names its class here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import fetch, send
from remask.model.pool import Pool
from remask.model.row_attention import RowQuery, attention_of
from remask.model.stage import Index, Stage, send_run
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan
from remask.policies.uniform_cache import Drift


class HookedCanvas(Protocol):
    """A canvas whose plan has a hook."""

    hook_state: Any  # the hook's state between passes of this canvas; None at first
    hook_output: Any  # the hook's report to the policy (`View.hook_output`), on the host; None at first

    @property
    def canvas(self) -> Canvas:
        """Its tokens."""
        ...

    @property
    def states(self) -> Tensor | None:
        """The hidden states that leave each layer but the last, [layers - 1, T, D]; None if they are not kept."""
        ...

    @property
    def adapter(self) -> str | None:
        """The adapter of its request; None without one."""
        ...

    def slots(self, layer: int) -> NDArray[np.int64]:
        """Its K/V slots in `layer`, [T]."""
        ...


@dataclass(frozen=True, slots=True)
class PassCanvas:
    """A canvas of a pass whose plan has a hook of one kind."""

    number: int  # index of the canvas in the pass
    branch: HookedCanvas
    plan: Plan  # as it was admitted


@dataclass(frozen=True, slots=True)
class AttendingRows:
    """Rows of a canvas whose attention in one layer is computed (`DeviceHook.attention`)."""

    branch: HookedCanvas
    positions: Index  # of the rows, int64 [N]
    summed: int  # number of leading rows of which only the sum is computed
    key_positions: Index | None = None  # the positions that are attended to, int64 [K]; None: all of the canvas


Changed = Mapping[int, Plan]  # new plans by the index of their canvas in the pass


class DeviceHook:
    """The hooks of one kind in one pass, of all canvases together, so that the host waits once for all of them.

    The base class does nothing. A failed pass may be repeated, also over other canvases. So a repeat must give the same
    result whatever a hook left in `hook_state` before `after_pass`.
    """

    def __init__(self, model: Transformer, pool: Pool, canvases: Sequence[PassCanvas]) -> None:
        self.model = model
        self.pool = pool
        self.canvases = canvases

    @property
    def device(self) -> torch.device:
        """Where the tensors of the pass are."""
        return self.model.device

    @property
    def layered(self) -> bool:
        """Whether the pass runs layer by layer for any of its canvases (`LayerHook.layered`)."""
        return any(canvas.plan.hook is not None and canvas.plan.hook.layered for canvas in self.canvases)

    def attention(self, layer: int, requests: Sequence[AttendingRows]) -> list[tuple[Tensor, Tensor]]:
        """The attention of rows of several canvases in `layer`, computed from the inputs that the canvases keep.

        Queries are projected again, and K is read from the pool: before the layer has run, it is that of the last pass.
        Returns for each of `requests` the attention of its leading `summed` rows, summed over rows and heads, float32
        [K], and the logarithm of the attention of its other rows, float32 [heads, N - summed, K], -inf for positions
        that a row does not see. The host does not wait.
        """
        return attention_of(self.model, self.pool, layer, [self._row_query(layer, rows) for rows in requests])

    def _row_query(self, layer: int, rows: AttendingRows) -> RowQuery:
        """The query of `rows` on the device. Its inputs are tokens in layer 0, and kept hidden states above it."""
        branch, key_positions = rows.branch, rows.key_positions
        states = None
        if layer:
            assert branch.states is not None
            states = branch.states[layer - 1]
        slots = branch.slots(layer)
        return RowQuery(
            states=states,
            rows=send(rows.positions if layer else branch.canvas.tokens[rows.positions], self.device),
            slots=send_run(slots if key_positions is None else slots[key_positions], self.device),
            positions=rows.positions,
            sum_count=rows.summed,
            adapter=branch.adapter,
            key_positions=key_positions,
        )

    def before(self, stage: Stage, h: Tensor, plans: Sequence[Plan]) -> Changed:  # noqa: ARG002
        """Act before `stage` runs. `h` is the output of the previous stage; `plans` are those of all canvases.

        Returns plans with other rows in this layer. They replace the admitted plans, also if the pass is repeated: a
        choice cannot be made twice, because the values that it compared are then overwritten.
        """
        return {}

    def after(self, layer: int, plans: Sequence[Plan]) -> Changed:  # noqa: ARG002
        """Act once `layer` has run. Returns plans with other rows in the layers above, for this pass alone."""
        return {}

    def after_pass(self) -> None:
        """Act once all layers have run."""


class HoldStillRows(DeviceHook):
    """Compares what each layer is about to compute with the cache."""

    def before(self, stage: Stage, h: Tensor, plans: Sequence[Plan]) -> Changed:
        """Hold rows whose V is close to the cached V. Waits for the device if a plan compares rows in this layer."""
        layer = stage.layers.start
        starts = np.cumsum([0, *(len(plan.spans.at(layer).positions) for plan in plans)])
        drifts: list[tuple[int, Drift]] = []
        rows = []
        slots = []
        for pass_canvas in self.canvases:
            plan = plans[pass_canvas.number]
            span = plan.spans.at(layer)
            if isinstance(plan.hook, Drift) and plan.hook.compares(span) and span.layers.start == layer:
                candidates = np.flatnonzero(plan.hook.candidates)
                drifts.append((pass_canvas.number, plan.hook))
                rows.append(starts[pass_canvas.number] + np.searchsorted(span.positions, candidates))
                slots.append(pass_canvas.branch.slots(layer)[candidates])
        if not drifts:
            return {}
        model = self.model
        all_rows, all_slots = send(np.stack([np.concatenate(rows), np.concatenate(slots)]), model.device)
        similarity = fetch(model.ranks.run_on_all(_value_similarity, model, stage, h, self.pool, all_rows, all_slots))
        ends = np.cumsum([len(canvas_rows) for canvas_rows in rows])[:-1]
        changed = {}
        for (number, drift), similarities in zip(drifts, np.split(similarity, ends), strict=True):
            held = drift.candidates.copy()
            held[held] = similarities >= 1 - drift.threshold
            changed[number] = drift.hold(plans[number], layer, held)
        return changed


@torch.inference_mode()
def _value_similarity(model: Transformer, stage: Stage, h: Tensor, pool: Pool, rows: Tensor, slots: Tensor) -> Tensor:
    return model.value_similarity(stage, h, pool, rows, slots)
