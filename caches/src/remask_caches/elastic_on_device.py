"""The device's part of `elastic-cache`: it watches attention between layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import fetch, send
from remask.model.stage import Index, Stage
from remask.plan import Plan
from remask.policies.on_device import AttendingRows, Changed, DeviceHook, PassCanvas
from remask_caches.elastic import Similarity, Watch


@dataclass(slots=True)
class Tracker:
    """The tracked tokens of one canvas between passes, and the results of the present pass so far.

    A repeated pass reads keys that it has written itself, so comparisons made before the repeat are kept.

    Attributes:
        tokens: canvas positions that any layer tracks, ascending, int64 [N]; empty before the first pass.
        drifts: drift in each layer that the present pass has compared.
        reference: the last layer that the present pass began, and the attention of the tracked tokens in it in the last
            pass, as `DeviceHook.attention` returns it; None in a first pass.
    """

    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    drifts: dict[int, float] = field(default_factory=dict)
    reference: tuple[int, Tensor] | None = None

    def finish(self, tokens: NDArray[np.int64]) -> None:
        """End a pass, whose layers now track `tokens`, in any order and with repetitions."""
        self.tokens = np.unique(tokens)
        self.drifts, self.reference = {}, None


class WatchAttention(DeviceHook):
    """The watched canvases of one pass."""

    @cached_property
    def _watchers(self) -> list["DriftWatcher"]:
        return [DriftWatcher(canvas, self.device) for canvas in self.canvases]

    def before(self, stage: Stage, h: Tensor, plans: Sequence[Plan]) -> Changed:  # noqa: ARG002
        """Keep the layer's attention in the last pass, with which that of this pass is compared."""
        layer = stage.layers.start
        watchers = [watcher for watcher in self._watchers if watcher.lacks_reference(layer)]
        queries = [watcher.query(watcher.window[:0], watcher.tracked) for watcher in watchers]
        for watcher, (_, rows) in zip(watchers, self.attention(layer, queries), strict=True):
            watcher.tracker.reference = layer, rows
        return {}

    def after(self, layer: int, plans: Sequence[Plan]) -> Changed:
        """Refresh the canvases whose attention has drifted in `layer` from the next layer on."""
        watchers = self._watchers
        comparing = [watcher for watcher in watchers if watcher.compares(layer)]
        tracked = [watcher.tracked[: None if watcher.compares(layer) else 0] for watcher in watchers]
        queries = [watcher.query(watcher.window, rows) for watcher, rows in zip(watchers, tracked, strict=True)]
        drifts: list[tuple[DriftWatcher, Tensor]] = []
        for watcher, (mass, rows) in zip(watchers, self.attention(layer, queries), strict=True):
            watcher.follow(mass)
            if watcher.compares(layer) and layer not in watcher.tracker.drifts:
                drifts.append((watcher, watcher.drift(rows)))
        if drifts:
            values = fetch(torch.stack([value for _, value in drifts]))
            for (watcher, _), value in zip(drifts, values, strict=True):
                watcher.tracker.drifts[layer] = float(value)
        due = [watcher for watcher in comparing if watcher.needs_refresh(layer)]
        return {watcher.number: watcher.watch.refresh(plans[watcher.number], layer + 1) for watcher in due}

    def after_pass(self) -> None:
        """Report the tokens that the layers track now, which the next pass compares."""
        tokens = [torch.cat(watcher.followed) for watcher in self._watchers]
        ends = np.cumsum([len(canvas_tokens) for canvas_tokens in tokens])[:-1]
        for watcher, canvas_tokens in zip(self._watchers, np.split(fetch(torch.cat(tokens)), ends), strict=True):
            watcher.tracker.finish(canvas_tokens)
            watcher.branch.hook_output = watcher.tracker.tokens


class DriftWatcher:
    """Watches the attention of one canvas during one pass. The tracked tokens change at its end."""

    def __init__(self, canvas: PassCanvas, device: torch.device) -> None:
        """The first watcher of a request gives it a `Tracker`, which later ones read and update."""
        self.number = canvas.number
        self.branch = canvas.branch
        if self.branch.hook_state is None:
            self.branch.hook_state = Tracker()
        self.tracker = self.branch.hook_state
        assert isinstance(canvas.plan.hook, Watch)
        self.watch = canvas.plan.hook
        self.window = np.flatnonzero(self.watch.window)
        self.tracked = np.flatnonzero(self.watch.tracked)
        self.barred = send(~self.watch.among, device)
        self.track_count = min(self.watch.track_num, int(np.count_nonzero(self.watch.among)))
        self.last_layer = canvas.plan.layers - 1
        self.followed: list[Tensor] = []  # the tokens to track, int64 [track_count], of each layer that has run
        self.refreshing = False

    def compares(self, layer: int) -> bool:
        """Whether attention in `layer` may call for a refresh of the layers above. A pass refreshes a canvas once."""
        return bool(len(self.tracked)) and layer < self.last_layer and not self.refreshing

    def lacks_reference(self, layer: int) -> bool:
        """Whether `layer` will be compared, and its attention in the last pass is not known yet."""
        reference, drifts = self.tracker.reference, self.tracker.drifts
        return self.compares(layer) and layer not in drifts and (reference is None or reference[0] != layer)

    def query(self, window: Index, tracked: Index) -> AttendingRows:
        """A query for the attention of the rows `window`, summed, and of each row of `tracked`, to all positions."""
        return AttendingRows(self.branch, np.concatenate([window, tracked]), len(window))

    def follow(self, mass: Tensor) -> None:
        """Track the positions with the largest `mass`, float32 [T], among those that may be tracked."""
        self.followed.append(mass.masked_fill(self.barred, -1).topk(self.track_count).indices)

    def drift(self, rows: Tensor) -> Tensor:
        """Drift of the tracked tokens' attention to `rows`, float32 [heads, N, T]."""
        assert self.tracker.reference is not None
        return drift(self.tracker.reference[1], rows, self.watch.similarity)

    def needs_refresh(self, layer: int) -> bool:
        """Whether the drift in `layer` calls for a refresh. Sets `refreshing`, after which no layer is compared."""
        self.refreshing = max(0.0, 1.0 - self.tracker.drifts[layer]) < self.watch.threshold
        return self.refreshing


def drift(old: Tensor, new: Tensor, similarity: Similarity) -> Tensor:
    """One minus the mean cosine similarity of two results of `DeviceHook.attention`, float32 []; exactly 0 if equal.

    "heads" compares the vectors over heads at each key, and takes the mean over keys and tokens. "keys" compares each
    token's vector over keys, which is its mean over heads, and takes the mean over tokens.
    """
    if similarity == "heads":
        old, new, dim = _scaled(old), _scaled(new), 0
    else:
        old, new, dim = old.exp().mean(0), new.exp().mean(0), -1
    # One minus a cosine near 1 loses its digits; the difference of the unit vectors keeps them.
    distance = (_unit(old, dim) - _unit(new, dim)).square().sum(dim)
    # Keys that a token does not see are no vectors, and are left out.
    return (distance.sum() / (distance.numel() if dim else old.any(0).sum())) / 2


def _scaled(rows: Tensor) -> Tensor:
    """Probabilities divided by the largest of any head at each key, so that small ones keep their direction.

    `rows` are logarithms. The result is 0 at keys that are not seen.
    """
    return (rows - rows.amax(0, keepdim=True).clamp_min(torch.finfo(rows.dtype).min)).exp()


def _unit(rows: Tensor, dim: int) -> Tensor:
    """Vectors along `dim` scaled to length 1; zero vectors stay zero."""
    # `norm` along the heads takes PyTorch ten times as long on a CPU.
    return rows / rows.square().sum(dim, keepdim=True).sqrt().clamp_min(torch.finfo(rows.dtype).tiny)
