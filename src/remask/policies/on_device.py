"""What layer hooks do on the device between layers: the half that the hook in the plan names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import fetch, send
from remask.model.pool import Pool
from remask.model.row_attention import AskedRows, look
from remask.model.stage import Index, Stage, send_run
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan
from remask.policies.acache import Weigh
from remask.policies.elastic import Similarity, Watch
from remask.policies.uniform_cache import Drift


class HookedCanvas(Protocol):
    """A canvas whose plan has a hook.

    Attributes:
        canvas: its tokens.
        states: the hidden states that leave each layer but the last, [layers - 1, T, D]; None: none are kept.
        adapter: the adapter of its request; None: the base alone.
        hook_state: what the hook keeps between passes of this canvas; None before it has set it.
        hook_output: what the hook reports to the policy (`View.hook_output`), on the host; None before it is set.
    """

    @property
    def canvas(self) -> Canvas: ...

    @property
    def states(self) -> Tensor | None: ...

    @property
    def adapter(self) -> str | None: ...

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


class AttentionScores(DeviceHook):
    """Reports the attention that the plans ask for to the policy: float32 [T], 0 at other positions."""

    def done(self) -> None:
        """Waits for the device once for all canvases."""
        model = self.model
        places = [
            (each.branch, each.plan.hook.rows.nonzero()[0], each.plan.hook.among.nonzero()[0])
            for each in self.canvases
            if isinstance(each.plan.hook, Weigh)
        ]
        layers = range(model.config.layers)
        masses = [[mass for mass, _ in look(model, self.pool, layer, _asked(model, layer, places))] for layer in layers]
        totals = [torch.stack(each).sum(0) for each in zip(*masses, strict=True)]
        ends = np.cumsum([len(each) for each in totals])[:-1]
        for (branch, _, among), found in zip(places, np.split(fetch(torch.cat(totals)), ends), strict=True):
            branch.hook_output = np.zeros(len(branch.canvas), dtype=np.float32)
            branch.hook_output[among] = found


def _asked(model: Transformer, layer: int, places: Sequence[tuple[HookedCanvas, Index, Index]]) -> list[AskedRows]:
    """The attention of each canvas' rows in `layer`, over some of its positions alone."""
    asked = []
    for branch, rows, among in places:
        states: Tensor | None = None
        if layer:
            assert branch.states is not None
            states = branch.states[layer - 1]
        numbers = rows if layer else branch.canvas.tokens[rows]
        slots = send_run(branch.slots(layer)[among], model.device)
        asked.append(AskedRows(states, send(numbers, model.device), slots, rows, len(rows), branch.adapter, among))
    return asked


class HoldStillRows(DeviceHook):
    """Compares what each layer is about to compute with the cache."""

    def before(self, stage: Stage, h: Tensor, plans: Sequence[Plan]) -> Changed:
        """Waits for the device once, for all canvases together, where a plan asks."""
        layer = stage.layers.start
        starts = np.cumsum([0, *(len(plan.spans.at(layer).positions) for plan in plans)])
        asking: list[tuple[int, Drift]] = []
        rows, slots = [], []
        for each in self.canvases:
            plan = plans[each.number]
            span = plan.spans.at(layer)
            if isinstance(plan.hook, Drift) and plan.hook.compares(span) and span.layers.start == layer:
                among = np.flatnonzero(plan.hook.among)
                asking.append((each.number, plan.hook))
                rows.append(starts[each.number] + np.searchsorted(span.positions, among))
                slots.append(each.branch.slots(layer)[among])
        if not asking:
            return {}
        model = self.model
        sent = send(np.stack([np.concatenate(rows), np.concatenate(slots)]), model.device)
        similarity = fetch(model.ranks.everywhere(_stillness, model, stage, h, self.pool, sent[0], sent[1]))
        ends = np.cumsum([len(each) for each in rows])[:-1]
        changed = {}
        for (number, drift), found in zip(asking, np.split(similarity, ends), strict=True):
            held = drift.among.copy()
            held[held] = found >= 1 - drift.threshold
            changed[number] = drift.hold(plans[number], layer, held)
        return changed


@torch.inference_mode()
def _stillness(model: Transformer, stage: Stage, h: Tensor, pool: Pool, rows: Tensor, slots: Tensor) -> Tensor:
    return model.stillness(stage, h, pool, rows, slots)


@dataclass(slots=True)
class Tracker:
    """The tracked tokens of one canvas between passes, and the results of the present pass so far.

    A repeated pass reads keys that it has written itself, so comparisons made before the repeat are kept.

    Attributes:
        tokens: canvas positions that any layer tracks, ascending, int64 [N]; empty before the first pass.
        moved: drift in each layer that the present pass has compared.
        reference: the last layer that the present pass began, and the attention of the tracked tokens there before it,
            as `attention_rows` returns it. None in a first pass.
    """

    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    moved: dict[int, float] = field(default_factory=dict)
    reference: tuple[int, Tensor] | None = None

    def done(self, tokens: NDArray[np.int64]) -> None:
        """The pass has run, and its layers came to track `tokens`, in any order and more than once."""
        self.tokens = np.unique(tokens)
        self.moved, self.reference = {}, None


class WatchAttention(DeviceHook):
    """The watched canvases of one pass."""

    def __init__(self, model: Transformer, pool: Pool, canvases: Sequence[Hooked]) -> None:
        super().__init__(model, pool, canvases)
        self._watchers = [DriftWatcher(each, model.device) for each in canvases]

    def before(self, stage: Stage, h: Tensor, plans: Sequence[Plan]) -> Changed:  # noqa: ARG002
        """Keep what the attention of the layer is compared with, that of the last pass."""
        layer = stage.layers.start
        lacking = [watcher for watcher in self._watchers if watcher.lacks_reference(layer)]
        asked = [watcher.asked(layer, watcher.window[:0], watcher.tracked) for watcher in lacking]
        for watcher, (_, rows) in zip(lacking, look(self.model, self.pool, layer, asked), strict=True):
            watcher.tracker.reference = layer, rows
        return {}

    def after(self, layer: int, plans: Sequence[Plan]) -> Changed:
        """Canvases whose attention has drifted are refreshed from the next layer on."""
        watchers = self._watchers
        comparing = [watcher for watcher in watchers if watcher.compares(layer)]
        asked = [
            watcher.asked(layer, watcher.window, watcher.tracked[: None if watcher.compares(layer) else 0])
            for watcher in watchers
        ]
        looked = look(self.model, self.pool, layer, asked)
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
        drifted = [watcher for watcher in comparing if watcher.needs_refresh(layer)]
        return {each.number: each.watch.refresh(plans[each.number], layer + 1) for each in drifted}

    def done(self) -> None:
        """Reports the tokens that the layers track now, which the next pass compares."""
        tokens = [torch.cat(watcher.followed) for watcher in self._watchers]
        ends = np.cumsum([len(each) for each in tokens])[:-1]
        for watcher, each in zip(self._watchers, np.split(fetch(torch.cat(tokens)), ends), strict=True):
            watcher.tracker.done(each)
            watcher.branch.hook_output = watcher.tracker.tokens


class DriftWatcher:
    """Watches the attention of one canvas during one pass. The tracked tokens change when the pass is done."""

    def __init__(self, hooked: Hooked, device: torch.device) -> None:
        branch, plan = hooked.branch, hooked.plan
        if branch.hook_state is None:
            branch.hook_state = Tracker()
        assert isinstance(plan.hook, Watch)
        self.number, self.branch, self.tracker, self.watch = hooked.number, branch, branch.hook_state, plan.hook
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

    def asked(self, layer: int, window: Index, tracked: Index) -> AskedRows:
        """The attention of the rows `window` and `tracked` in `layer`, over the whole canvas."""
        slots, positions = send_run(self.branch.slots(layer), self.device), np.concatenate([window, tracked])
        if layer == 0:
            tokens = send(self.branch.canvas.tokens[positions], self.device)
            return AskedRows(None, tokens, slots, positions, len(window), self.branch.adapter)
        assert self.branch.states is not None
        states, rows = self.branch.states[layer - 1], send(positions, self.device)
        return AskedRows(states, rows, slots, positions, len(window), self.branch.adapter)

    def follow(self, mass: Tensor) -> None:
        """Track the tokens with the largest `mass`, float32 [T], among those that may be tracked."""
        self.followed.append(mass.masked_fill(self.barred, -1).topk(self.count).indices)

    def drift(self, rows: Tensor) -> Tensor:
        """Drift of the tracked tokens' attention to `rows`, float32 [heads, N, T]."""
        assert self.tracker.reference is not None
        return drift(self.tracker.reference[1], rows, self.watch.similarity)

    def needs_refresh(self, layer: int) -> bool:
        """Whether the drift that was found in `layer` calls for a refresh."""
        self.refreshing = max(0.0, 1.0 - self.tracker.moved[layer]) < self.watch.threshold
        return self.refreshing


def drift(old: Tensor, new: Tensor, similarity: Similarity) -> Tensor:
    """One minus the mean cosine similarity of two results of `attention_rows`; 0 exactly where they are equal.

    "heads" compares at each key what the heads give to it, and takes the mean over keys and tokens. "keys" compares a
    token's mean over heads along the keys, and takes the mean over tokens.
    """
    if similarity == "heads":
        old, new, dim = _scaled(old), _scaled(new), 0
    else:
        old, new, dim = old.exp().mean(0), new.exp().mean(0), -1
    # One minus a cosine near 1 loses its digits; the difference of the unit vectors keeps them.
    apart = (_unit(old, dim) - _unit(new, dim)).square().sum(dim)
    # Keys that a token does not see are no vectors, and are left out.
    return (apart.sum() / (apart.numel() if dim else old.any(0).sum())) / 2


def _scaled(rows: Tensor) -> Tensor:
    """Probabilities over the largest of any head at each key, where even the least ones keep their direction.

    0 at keys that are not seen.
    """
    return (rows - rows.amax(0, keepdim=True).clamp_min(torch.finfo(rows.dtype).min)).exp()


def _unit(rows: Tensor, dim: int) -> Tensor:
    """Vectors along `dim` at length 1; those that are zero stay so."""
    # A norm along the heads takes PyTorch ten times as long on a CPU.
    return rows / rows.square().sum(dim, keepdim=True).sqrt().clamp_min(torch.finfo(rows.dtype).tiny)
