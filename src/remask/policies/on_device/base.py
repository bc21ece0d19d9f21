"""The protocol of the device half of a layer hook, which the runner calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remask.model.pool import Pool
from remask.model.stage import Stage
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan


class HookedCanvas(Protocol):
    """A canvas whose plan has a hook.

    Attributes:
        canvas: its tokens.
        states: the hidden states that leave each layer but the last, [layers - 1, T, D]; None: none are kept.
        hook_state: what the hook keeps between passes of this canvas; None before it has set it.
        hook_output: what the hook reports to the policy (`View.hook_output`), on the host; None before it is set.
    """

    @property
    def canvas(self) -> Canvas: ...  # noqa: D102 - see above

    @property
    def states(self) -> Tensor | None: ...  # noqa: D102

    hook_state: Any
    hook_output: Any

    def slots(self, layer: int) -> NDArray[np.int64]:
        """Its K/V slots in `layer`, [T]."""
        ...


@dataclass(frozen=True, slots=True)
class Hooked:
    """A canvas of a pass whose plan has a hook of one kind.

    Attributes:
        number: which canvas of the pass it is.
        branch: the canvas.
        plan: as it was admitted.
    """

    number: int
    branch: HookedCanvas
    plan: Plan


Changed = Mapping[int, Plan]
"""New plans by the numbers of their canvases in the pass."""


class DeviceHook:
    """The hooks of one kind in one pass, of all canvases together, so that the host waits once for all of them.

    The base class does nothing. A pass that fails may be repeated, also over other canvases: with what a hook leaves in
    `hook_state` before `done`, a repeat must give the same result.
    """

    def __init__(self, model: Transformer, pool: Pool, canvases: Sequence[Hooked]) -> None:
        self.model, self.pool, self.canvases = model, pool, canvases

    def before(self, stage: Stage, h: Tensor, plans: Sequence[Plan]) -> Changed:  # noqa: ARG002
        """Act before `stage` runs; `h` is the output of the stage before, and `plans` are those of all canvases.

        Returns plans with other rows in this layer. They replace the admitted plans, also if the pass is repeated: a
        choice that compares with values which are then overwritten cannot be made twice.
        """
        return {}

    def after(self, layer: int, plans: Sequence[Plan]) -> Changed:  # noqa: ARG002
        """Act once `layer` has run. Returns plans with other rows in the layers above, for this pass alone."""
        return {}

    def done(self) -> None:
        """Act once all layers have run."""
