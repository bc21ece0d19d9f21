"""Watching attention: how far the attention of a layer that has just run has drifted since the last pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from remask.core.plan import Plan
from remask.engine.canvas_state import CanvasState
from remask.engine.stage_rows import Index, send_run
from remask.engine.tracker import attention_rows, drift
from remask.models.pool import Pool
from remask.models.stage import Run
from remask.models.transformer import Transformer
from remask.sending import fetch, send


class DriftWatcher:
    """Watches the attention of one canvas during one pass. What it tracks changes when the pass is done."""

    def __init__(self, number: int, branch: CanvasState, plan: Plan, device: torch.device) -> None:
        assert branch.tracker is not None
        assert plan.watch is not None
        self.number, self.branch, self.tracker, self.watch = number, branch, branch.tracker, plan.watch
        self.device = device
        self.window, self.tracked = np.flatnonzero(self.watch.window), np.flatnonzero(self.watch.tracked)
        self.barred = send(~self.watch.among, device)
        self.count = min(self.watch.track_num, int(np.count_nonzero(self.watch.among)))
        self.last = plan.layers - 1
        self.followed: list[Tensor] = []  # the tokens to track, int64 [count], of each layer that has run
        self.refreshing = False

    def compares(self, layer: int) -> bool:
        """Whether attention in `layer` may call for a refresh of the layers above. A pass refreshes a canvas once."""
        return bool(len(self.tracked)) and layer < self.last and not self.refreshing

    def lacks_reference(self, layer: int) -> bool:
        """Whether `layer` is about to run for the first time in a pass that compares it."""
        reference, moved = self.tracker.reference, self.tracker.moved
        return self.compares(layer) and layer not in moved and (reference is None or reference[0] != layer)

    def asked(self, layer: int, window: Index, tracked: Index) -> "Asked":
        """The attention of the rows `window` and `tracked` in `layer`, over the whole canvas."""
        slots, positions = send_run(self.branch.slots(layer), self.device), np.concatenate([window, tracked])
        if layer == 0:
            tokens = send(self.branch.canvas.tokens[positions], self.device)
            return Asked(None, tokens, slots, positions, len(window))
        assert self.branch.states is not None
        states, rows = self.branch.states[layer - 1], send(positions, self.device)
        return Asked(states, rows, slots, positions, len(window))

    def follow(self, mass: Tensor) -> None:
        """Come to track the tokens with the most `mass`, float32 [T], of those that may be tracked."""
        self.followed.append(mass.masked_fill(self.barred, -1).topk(self.count).indices)

    def drift(self, rows: Tensor) -> Tensor:
        """Drift of the tracked tokens' attention to `rows`, float32 [heads, N, T]."""
        assert self.tracker.reference is not None
        return drift(self.tracker.reference[1], rows, self.watch.similarity)

    def needs_refresh(self, layer: int) -> bool:
        """Whether the drift that was found in `layer` calls for a refresh."""
        self.refreshing = max(0.0, 1.0 - self.tracker.moved[layer]) < self.watch.threshold
        return self.refreshing


def keep_references(model: Transformer, pool: Pool, watchers: list[DriftWatcher], layer: int) -> None:
    """Keep what the attention in `layer`, which is about to run, is compared with: that of the last pass."""
    lacking = [watcher for watcher in watchers if watcher.lacks_reference(layer)]
    asked = [watcher.asked(layer, watcher.window[:0], watcher.tracked) for watcher in lacking]
    for watcher, (_, rows) in zip(lacking, look(model, pool, layer, asked), strict=True):
        watcher.tracker.reference = layer, rows


def find_drift(model: Transformer, pool: Pool, watchers: list[DriftWatcher], layer: int) -> list[DriftWatcher]:
    """Those of `watchers` whose canvases have drifted in `layer`, which has just run."""
    comparing = [watcher for watcher in watchers if watcher.compares(layer)]
    asked = [
        watcher.asked(layer, watcher.window, watcher.tracked[: None if watcher.compares(layer) else 0])
        for watcher in watchers
    ]
    looked = look(model, pool, layer, asked)
    for watcher, (mass, _) in zip(watchers, looked, strict=True):
        watcher.follow(mass)
    new = [
        (watcher.tracker.moved, watcher.drift(rows))
        for watcher, (_, rows) in zip(watchers, looked, strict=True)
        if watcher.compares(layer) and layer not in watcher.tracker.moved
    ]
    if new:
        for (moved, _), value in zip(new, fetch(torch.stack([drifted for _, drifted in new])), strict=True):
            moved[layer] = float(value)
    return [watcher for watcher in comparing if watcher.needs_refresh(layer)]


def finish(watchers: list[DriftWatcher]) -> None:
    """The pass has run: what its layers came to track is what the next one compares. Read of all canvases at once."""
    tokens = [torch.cat(watcher.followed) for watcher in watchers]
    ends = np.cumsum([len(each) for each in tokens])[:-1]
    for watcher, each in zip(watchers, np.split(fetch(torch.cat(tokens)), ends), strict=True):
        watcher.tracker.done(each)


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows of a canvas whose attention in one layer is wanted.

    Attributes:
        states: what entered the layer when the canvas' rows were last computed, [T, D]; None: the embedding.
        rows: int64 [N], positions among `states`; without these, tokens.
        slots: those of the canvas' K in the layer.
        positions: canvas positions of the rows, int64 [N].
        window: of how many leading rows only the mass is wanted.
    """

    states: Tensor | None
    rows: Tensor
    slots: Run | Tensor
    positions: Index
    window: int


Looked: TypeAlias = tuple[Tensor, Tensor]
"""Mass of the window's attention, float32 [T], and `attention_rows` of the rows after it."""


def look(model: Transformer, pool: Pool, layer: int, asked: Sequence[Asked]) -> list[Looked]:
    """The attention that is `asked` for, over each canvas. Queries are projected once for all of them."""
    if not asked:
        return []
    positions = send(np.concatenate([each.positions for each in asked]), model.device)
    return model.ranks.everywhere(_look_here, model, pool, layer, asked, positions)


@torch.inference_mode()
def _look_here(model: Transformer, pool: Pool, layer: int, asked: Sequence[Asked], positions: Tensor) -> list[Looked]:
    """As `look`, on every rank: its heads are read, and those of all ranks are returned."""
    h = torch.cat([model.embed(each.rows) if each.states is None else each.states[each.rows] for each in asked])
    parts = torch.split(model.queries(h, layer, positions), [len(each.rows) for each in asked])
    found = []
    for q, each in zip(parts, asked, strict=True):
        rows = attention_rows(q, model.arithmetic.placed(pool.k[layer][each.slots]))
        found.append((rows[:, : each.window].exp().sum((0, 1)), rows[:, each.window :]))
    if not model.ranks.several:
        return found
    masses = model.ranks.sum(torch.cat([mass for mass, _ in found]))
    heads = model.ranks.gather(torch.cat([rows.flatten() for _, rows in found]))
    flat = torch.split(heads, [rows.numel() for _, rows in found], dim=1)
    return [
        (total, part.view(len(heads), *rows.shape).flatten(0, 1))
        for total, part, (mass, rows) in zip(
            torch.split(masses, [len(mass) for mass, _ in found]), flat, found, strict=True
        )
    ]
