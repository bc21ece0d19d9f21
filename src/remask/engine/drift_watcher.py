"""Watching attention: how far the attention of a layer that has just run has drifted since the last pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from remask.core.plan import Watch
from remask.engine.canvas_state import CanvasState
from remask.engine.stage_rows import Index, send_run
from remask.engine.tracker import attention_rows, drift
from remask.models.pool import Pool
from remask.models.stage import Run
from remask.models.transformer import Transformer
from remask.sending import fetch, send


class DriftWatcher:
    """Watches the attention of one canvas during one pass. The canvas' tracker changes when the pass is `done`."""

    def __init__(self, number: int, branch: CanvasState, watch: Watch, device: torch.device) -> None:
        assert branch.tracker is not None
        self.number, self.branch, self.tracker, self.device = number, branch, branch.tracker, device
        self.threshold = watch.threshold
        self.window = np.flatnonzero(watch.window)
        self.barred = send(~watch.among, device)
        self.tokens: list[int] = []  # the token to track, of each layer that has run
        self.rows: list[Tensor] = []  # and its attention, float32 [T]

    def positions(self, layer: int) -> Index:
        """Rows whose attention is watched: those of the window, and the tracked token where there is one."""
        token = self.tracker.tokens[layer]
        return self.window if token < 0 else np.append(self.window, token)

    def asked(self, layer: int, positions: Index) -> "_Asked":
        """The attention of the rows at `positions` in `layer`, over the whole canvas."""
        slots = send_run(self.branch.slots(layer), self.device)
        if layer == 0:
            return _Asked(None, send(self.branch.canvas.tokens[positions], self.device), slots)
        assert self.branch.states is not None
        return _Asked(self.branch.states[layer - 1], send(positions, self.device), slots)

    def measure(self, layer: int, attention: Tensor) -> Tensor:
        """Drift of the tracked token's attention (0 where none is tracked) and the token to track: float32 [2]."""
        mass = attention[: len(self.window)].sum(0).masked_fill(self.barred, -1)
        # float32 holds positions exactly: canvases are far shorter than 2 ** 24.
        best = mass.argmax().float()
        tracked = len(attention) > len(self.window)
        return torch.stack([drift(self.tracker.rows[layer], attention[-1]) if tracked else best.new_zeros(()), best])

    def needs_refresh(self, moved: float) -> bool:
        """Whether a drift of `moved` calls for a refresh. A pass refreshes a canvas at most once."""
        needed = max(0.0, 1.0 - moved) < self.threshold
        if needed:
            self.threshold = 0.0
        return needed

    def done(self) -> None:
        """The pass has run: what it saw is what the next one compares with."""
        if self.rows:
            self.tracker.tokens, self.tracker.rows = np.array(self.tokens), torch.stack(self.rows)


def find_drift(model: Transformer, pool: Pool, watchers: list[DriftWatcher], layer: int) -> list[DriftWatcher]:
    """Those of `watchers` whose canvases have drifted in `layer`, which has just run."""
    before = _attention(model, pool, watchers, layer, [watcher.positions(layer) for watcher in watchers])
    measured = [watcher.measure(layer, rows) for watcher, rows in zip(watchers, before, strict=True)]
    seen = fetch(torch.stack(measured)).tolist()  # of all canvases at once
    tokens = [np.array([int(token)]) for _, token in seen]
    for watcher, token, row in zip(watchers, tokens, _attention(model, pool, watchers, layer, tokens), strict=True):
        watcher.tokens.append(int(token[0]))
        watcher.rows.append(row[0])
    return [watcher for watcher, (moved, _) in zip(watchers, seen, strict=True) if watcher.needs_refresh(moved)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """Rows of a canvas whose attention in one layer is wanted.

    Attributes:
        states: what entered the layer when the canvas' rows were last computed, [T, D]; None: the embedding.
        rows: int64 [N], positions among `states`; without these, tokens.
        slots: those of the canvas' K in the layer.
    """

    states: Tensor | None
    rows: Tensor
    slots: Run | Tensor


def _attention(
    model: Transformer, pool: Pool, watchers: list[DriftWatcher], layer: int, positions: list[Index]
) -> list[Tensor]:
    """Attention probabilities of each watcher's `positions` over its canvas, float32 [N, T].

    Queries are projected once for all watchers.
    """
    asked = [watcher.asked(layer, places) for watcher, places in zip(watchers, positions, strict=True)]
    rows = send(np.concatenate(positions), model.device)
    return model.ranks.everywhere(_attention_rows, model, pool, layer, asked, rows)


@torch.inference_mode()
def _attention_rows(
    model: Transformer, pool: Pool, layer: int, asked: Sequence[_Asked], positions: Tensor
) -> list[Tensor]:
    """As `_attention`, on every rank: its heads are read, and means over the heads of all ranks are returned."""
    h = torch.cat([model.embed(each.rows) if each.states is None else each.states[each.rows] for each in asked])
    parts = torch.split(model.queries(h, layer, positions), [len(each.rows) for each in asked])
    found = [
        attention_rows(q, model.arithmetic.placed(pool.k[layer][each.slots]))
        for q, each in zip(parts, asked, strict=True)
    ]
    if not model.ranks.several:
        return found
    total = model.ranks.sum(torch.cat([rows.flatten() for rows in found])) / model.ranks.shard.size
    flat = torch.split(total, [rows.numel() for rows in found])
    return [mean.view_as(rows) for mean, rows in zip(flat, found, strict=True)]
