"""Running passes. Where plans watch attention, layer by layer: what drifted is refreshed from the next layer on."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.plan import Plan
from remask.engine.canvas_state import CanvasState
from remask.engine.chunks import PrefixPass, keep_leaving_states
from remask.engine.drift_watcher import DriftWatcher, find_drift
from remask.engine.pack import pack
from remask.engine.read import read_rows
from remask.engine.running import RunningRequest
from remask.models.pool import Pool
from remask.models.stage import StepBatch
from remask.models.transformer import Transformer

Items = list[tuple[CanvasState, Plan]]


class Runner:
    """Runs passes of one model over one pool on the device, and reads their logits."""

    def __init__(self, model: Transformer, pool: Pool) -> None:
        self.model, self.pool = model, pool

    @torch.inference_mode()
    def run(self, items: Items, passes: Sequence[PrefixPass]) -> tuple[Tensor, Items]:
        """One forward pass over `items`, of which `passes` are the first. Only canvases' memory is changed.

        Returns the final hidden states of the predicted rows, [M, D], and the items with the plans that were run, which
        their ledgers hold too. Where nothing is watched nothing waits for the device; else the host reads two numbers a
        watched canvas after every layer but the last.
        """
        model, batch = self.model, self.pack(items, passes)
        if all(plan.watch is None for _, plan in items):
            return model.forward(batch, self.pool), items
        items, stages = list(items), batch.stages
        watchers = [
            DriftWatcher(number, branch, plan.watch, model.device)
            for number, (branch, plan) in enumerate(items)
            if plan.watch is not None
        ]
        h = model.embed(batch.tokens)
        while stages:
            stage, stages = stages[0], stages[1:]
            h = model.run(stage, h, self.pool)
            # A stage without layers has still to keep what leaves this one.
            if not stages or not len(stages[0].layers):
                continue
            done = stage.layers.stop
            drifted = self.find_drift(watchers, done - 1)
            for watcher in drifted:
                plan = items[watcher.number][1].refreshed(done)
                watcher.branch.ledger.revise(plan)
                items[watcher.number] = watcher.branch, plan
            if drifted:
                batch = self.pack(items, passes, first=done)
                stages = batch.stages
        return model.leave(h[batch.predict]), items

    def pack(self, items: Items, passes: Sequence[PrefixPass], first: int = 0) -> StepBatch:
        """`items` as one batch from layer `first` on, with what the pieces of `passes` keep."""
        return keep_leaving_states(pack(items, self.model.device, first, self.model.arithmetic.invariant), passes)

    def find_drift(self, watchers: list[DriftWatcher], layer: int) -> list[DriftWatcher]:
        """Those of `watchers` whose canvases' attention has drifted in `layer`, which has just run."""
        return find_drift(self.model, self.pool, watchers, layer)

    def read(self, hidden: Tensor, requests: Sequence[RunningRequest]) -> NDArray[np.float32]:
        """Token and confidence of every predicted position, float32 [2, rows], in the order of `requests`."""
        return read_rows(self.model, hidden, requests)
