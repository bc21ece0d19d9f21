"""A transformer and a runner whose operations are timed. An engine's own know nothing of it and pay nothing for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.chunks import PrefixPass
from remask.engine.drift_watcher import DriftWatcher
from remask.engine.engine import Engine
from remask.engine.runner import Items, Runner
from remask.engine.running import RunningRequest
from remask.models.attention import Attention, Sink
from remask.models.stage import Segments, StepBatch
from remask.models.transformer import Transformer
from remask.models.weights import LayerWeights
from remask_lab.ops.clock import Clock

REST = "rest"
# "projections" are Q, K, V and the attention output, with RoPE and the writing of K/V; "selection" is choosing rows by
# how far they moved (dLLM-Cache), "watch" looking at attention (Elastic-Cache), "sampling" all from logits to tokens on
# the host; "rest" is planning, scheduling, embedding, residuals, and rows carried or restored between stages.
OPERATIONS = ("projections", "attention", "mlp", "head", "norms", "selection", "watch", "sampling", "packing", REST)


def timed(engine: Engine) -> Clock:
    """The clock of `engine`, whose operations are timed from now on."""
    clock = Clock(engine.model.device, REST)
    engine.runner = _TimedRunner(_TimedTransformer(engine.model, clock), engine.pool, clock)
    return clock


class _TimedAttention:
    def __init__(self, inner: Attention, clock: Clock) -> None:
        self.inner, self.clock = inner, clock

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, sink: Sink | None = None) -> Tensor:
        with self.clock.running("attention"):
            return self.inner(q, k, v, segments, sink)


class _TimedTransformer(Transformer):
    def __init__(self, model: Transformer, clock: Clock) -> None:
        super().__init__(model.config, model.weights, _TimedAttention(model.attention, clock))
        self.clock = clock

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        with self.clock.running("norms"):
            return super().norm(x, weight)

    def head(self, hidden: Tensor) -> Tensor:
        with self.clock.running("head"):
            return super().head(hidden)

    def _choose(self, *inputs: Any) -> Tensor:
        with self.clock.running("selection"):
            return super()._choose(*inputs)

    def _attend(self, *inputs: Any) -> Tensor:
        with self.clock.running("projections"):
            return super()._attend(*inputs)

    def _feed(self, h: Tensor, w: LayerWeights) -> Tensor:
        with self.clock.running("mlp"):
            return super()._feed(h, w)


class _TimedRunner(Runner):
    def __init__(self, model: Transformer, pool: Any, clock: Clock) -> None:
        super().__init__(model, pool)
        self.clock = clock

    def pack(self, items: Items, passes: Sequence[PrefixPass], first: int = 0) -> StepBatch:
        with self.clock.running("packing"):
            return super().pack(items, passes, first)

    def find_drift(self, eyes: list[DriftWatcher], layer: int) -> list[DriftWatcher]:
        with self.clock.running("watch"):
            return super().find_drift(eyes, layer)

    def read(self, hidden: Tensor, requests: Sequence[RunningRequest]) -> NDArray[np.float32]:
        with self.clock.running("sampling"):
            return super().read(hidden, requests)
