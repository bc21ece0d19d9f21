"""Running a pass. Where its plans watch attention, layer by layer: what drifted is refreshed from the next layer on."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from remask.core.plan import Plan, Watch
from remask.engine.branch import Branch
from remask.engine.chunks import PrefixPass, keep_leaving_states
from remask.engine.pack import pack
from remask.engine.part import Index, send, send_mask, send_run
from remask.engine.tracker import attention_rows, drift
from remask.models.pool import Pool
from remask.models.transformer import Transformer

Items = list[tuple[Branch, Plan]]


@torch.inference_mode()
def run_pass(model: Transformer, pool: Pool, items: Items, passes: Sequence[PrefixPass]) -> tuple[Tensor, Items]:
    """One forward pass over `items`, of which `passes` are the first. Nothing given is changed but canvases' memory.

    Returns the final hidden states of the predicted rows, [M, D], and the items with the plans that were run, which
    their ledgers hold too. Where nothing is watched nothing waits for the device; else the host reads two numbers a
    watched canvas after every layer but the last.
    """
    batch = keep_leaving_states(pack(items, model.device), passes)
    if all(plan.watch is None for _, plan in items):
        return model.forward(batch, pool), items
    items, stages = list(items), batch.stages
    h = model.embed(batch.tokens)
    while stages:
        stage, stages = stages[0], stages[1:]
        h = model.run(stage, h, pool)
        done = stage.layers.stop
        # A stage without layers keeps what leaves this one, so it must not be packed anew.
        if not stages or not len(stages[0].layers):
            continue
        drifted = _look(model, pool, items, done - 1)
        for number in drifted:
            branch, plan = items[number]
            plan = plan.refreshed(done)
            branch.ledger.revise(plan)
            items[number] = branch, plan
        if drifted:
            batch = keep_leaving_states(pack(items, model.device, first=done), passes)
            stages = batch.stages
    return model.leave(h[batch.predict]), items


def _look(model: Transformer, pool: Pool, items: Items, layer: int) -> list[int]:
    """Numbers of the items whose attention has drifted in `layer`, which has just run; their trackers move on."""
    eyes = [
        _Eye(model, pool, branch, plan.watch, layer, number)
        for number, (branch, plan) in enumerate(items)
        if plan.watch is not None
    ]
    seen = torch.stack([eye.look() for eye in eyes]).tolist()
    return [eye.number for eye, (moved, token) in zip(eyes, seen, strict=True) if eye.follow(int(token), moved)]


class _Eye:
    """Looks at one canvas after one layer, whose inputs are kept and whose keys are in the pool."""

    def __init__(
        self, model: Transformer, pool: Pool, branch: Branch, watch: Watch, layer: int, number: int
    ) -> None:
        assert branch.tracker is not None
        self.model, self.branch, self.watch, self.layer, self.number = model, branch, watch, layer, number
        self.tracker = branch.tracker
        table = next(table for table in branch.tables if layer in table.layers)
        self.keys = pool.k[layer][send_run(table.slots, model.device)]

    def look(self) -> Tensor:
        """Drift of the tracked token's attention (0 where none is tracked), and the token to track: float32 [2]."""
        window = np.flatnonzero(self.watch.window)
        token = self.tracker.tokens[self.layer]
        attention = self._attention(window if token < 0 else np.append(window, token))
        mass = attention[: len(window)].sum(0)
        # float32 holds positions exactly: canvases are far shorter than 2 ** 24.
        best = mass.masked_fill(send_mask(~self.watch.among, mass.device), -1).argmax().float()
        moved = torch.zeros_like(best) if token < 0 else drift(self.tracker.rows[self.layer], attention[-1])
        return torch.stack([moved, best])

    def follow(self, token: int, moved: float) -> bool:
        """Track `token` from here on; returns whether what was tracked has `moved` too far."""
        self.tracker.tokens[self.layer] = token
        self.tracker.rows[self.layer] = self._attention(np.array([token]))[0]
        return max(0.0, 1.0 - moved) < self.watch.threshold

    def _attention(self, positions: Index) -> Tensor:
        """Float32 [N, T], from the input to the layer that each position had when it was last computed."""
        index = send(positions, self.model.device)
        if self.layer:
            assert self.branch.states is not None
            h = self.branch.states[self.layer - 1][index]
        else:
            h = self.model.embed(send(self.branch.canvas.tokens[positions], self.model.device))
        return attention_rows(self.model.queries(h, self.layer, index), self.keys)
