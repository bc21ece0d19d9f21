"""What a pass costs, does on its shared prefix and takes from the cache, from its plans and ledgers alone."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.plan.cost import NOTHING, OPERATIONS, Operation, OperationCost, PassCost, Widths
from remask.plan.hooks import HookCost
from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Mask, Positions, Span, neighbours, starts_of


@dataclass(frozen=True, slots=True)
class ExecutedPlan:
    """A canvas' part in a pass."""

    plan: Plan  # the plan that ran
    # The positions that other requests computed, where canvases that share them read leading ones together
    prefix: PrefixHit | None = None
    sharing: Hashable = None  # equal for canvases that read the same prefix
    outputs: bool = False  # attention and FFN outputs of computed rows are kept
    noisy: int = 0  # rows of the first layer that are denoised


def pass_cost(widths: Widths, canvases: Sequence[ExecutedPlan]) -> PassCost:
    """What one pass over `canvases` costs."""
    total = sum((_canvas_cost(widths, canvas) for canvas in canvases), NOTHING)
    keys = [_keys(widths, canvas.plan) for canvas in canvases]
    every, active = range(widths.layers), np.any([reach > 0 for reach in keys], axis=0) if keys else np.False_
    fed = [[span.count for span in canvas.plan.spans for _ in span.layers] for canvas in canvases]  # computed rows
    spans = [span for canvas in canvases for span in canvas.plan.spans]
    choosing = {(layer, span.pick.by) for span in spans if span.pick is not None for layer in _choosing(span)}
    hooks = [canvas.plan.hook.cost(widths, canvas.plan.spans) for canvas in canvases if canvas.plan.hook is not None]
    choosing |= {compared for canvas in hooks for compared in canvas.compares}
    watching = max((canvas.looks for canvas in hooks), default=0)
    predicts = any(canvas.plan.predict.any() for canvas in canvases)
    denoises = any(canvas.noisy for canvas in canvases)
    w, w_read = widths, widths.item * widths.hidden
    k = np.array(w.keys_of(every))
    together = int(((2 * np.array(w.queries_of(every)) + w.projected_of(every)) * active).sum())
    fed_weights = sum(feed.read(sum(rows)) for feed, *rows in zip(w.feeds, *fed, strict=True) if any(rows))
    # Of self-conditioning the embedding is read too, for what it expects of predicted rows.
    head = w.vocab * (2 if w.signal else 1) + w.dense * w.hidden
    weights: dict[Operation, int] = {
        "projections": w_read * together,
        "attention": w.item * 2 * int((k * active).sum()) * w.sink,
        "mlp": w_read * (fed_weights + denoises * 3 * w.signal),
        "head": w_read * predicts * head,
        "selection": w_read * len(choosing) * w.keys,
        "watch": w_read * watching * w.queries,
    }
    near = np.array([window is not None for window in w.windows_of(every)])
    reads = dict.fromkeys(OPERATIONS, 0)
    reads["attention"] = w.item * 2 * int((k * _keys_read(canvases, keys, near)).sum())
    both = {name: OperationCost(weights=weights[name], kv_read=reads[name]) for name in OPERATIONS}
    return total + PassCost(both)


def _canvas_cost(w: Widths, canvas: ExecutedPlan) -> PassCost:
    """What one canvas adds to a pass: all but weights, and K and V that attention reads."""
    plan, length = canvas.plan, len(canvas.plan.predict)
    projections = attention = mlp = selection = OperationCost()
    repeated = 0
    live: Mask = np.ones(length, dtype=np.bool_)  # before layer 0 every row can be embedded
    for span in plan.spans:
        looked, chosen = (0, 0) if span.pick is None else (int(span.pick.among.sum()), span.pick.count)
        rows, layers, compared = span.count, len(span.layers), len(_choosing(span))
        # Where rows are chosen K or V of these is there already.
        queries, kept_keys = sum(w.queries_of(span.layers)), sum(w.keys_of(span.layers))
        writes, there = int(span.written.sum()) + chosen, compared * chosen * w.keys
        sides = kept_keys * 2 * writes - there
        restored = int((span.rows & ~live).sum()) + (0 if span.save is None else int(span.save.sum()))
        # A row that is not computed adds its cached outputs, and one that is leaves them.
        outputs = 2 * int(span.rows.sum()) * canvas.outputs
        projections += OperationCost(
            flops=2 * w.hidden * (2 * rows * queries + sum(w.projected_of(span.layers)) * writes - there),
            kv_written=w.item * sides,
            states=w.item * w.hidden * (restored + layers * outputs),
            activations=w.item * 2 * rows * (layers * w.hidden + queries),
        )
        repeated += compared * 2 * w.hidden * w.keys * chosen
        selection += OperationCost(
            flops=compared * 2 * looked * w.hidden * w.keys,
            kv_read=compared * w.item * looked * w.keys,
            kv_written=compared * w.item * looked * w.keys,
            activations=compared * w.item * looked * w.hidden,
        )
        # The sink's value is added elementwise.
        attention += OperationCost(
            flops=2 * (2 * _pairs(w, plan, span) + queries * rows * w.sink),
            activations=w.item * 2 * rows * queries,
        )
        feeds = w.feeds[span.layers.start : span.layers.stop]
        mlp += OperationCost(
            flops=2 * rows * w.hidden * sum(feed.inner for feed in feeds),
            activations=w.item * rows * sum(feed.moved(w.hidden) for feed in feeds),
        )
        live = span.rows
    predicted = int(plan.predict.sum())
    head = OperationCost(
        flops=2 * predicted * w.hidden * (w.vocab + w.dense * w.hidden),
        activations=w.item * predicted * (w.hidden + w.vocab + 2 * w.dense * w.hidden),
    )
    if w.signal:
        head += OperationCost(
            flops=2 * predicted * w.hidden * w.vocab,
            states=w.item * predicted * w.hidden,
            activations=w.item * predicted * w.vocab,
        )
        mlp += OperationCost(
            flops=2 * canvas.noisy * w.hidden * 3 * w.signal,
            states=w.item * canvas.noisy * w.hidden,
            activations=w.item * canvas.noisy * (w.hidden + 3 * w.signal),
        )
    hook = HookCost() if plan.hook is None else plan.hook.cost(w, plan.spans)
    operations: dict[Operation, OperationCost] = {
        "projections": projections,
        "attention": attention,
        "mlp": mlp,
        "head": head,
        "selection": selection + hook.selection,
        "watch": hook.watch,
    }
    return PassCost(operations, repeated)


def _choosing(span: Span) -> list[int]:
    pick = span.pick
    return [] if pick is None else [layer for layer in span.layers if (layer - pick.first) % pick.every == 0]


def _pairs(w: Widths, plan: Plan, span: Span) -> int:
    """Pairs of a row and a key that it sees, times Q, in all layers of a span; chosen rows see as many as any may."""
    positions, chosen = np.flatnonzero(span.computed), 0 if span.pick is None else span.pick.count
    sees = np.full(len(positions), len(span.rows)) if plan.sees is None else plan.sees[positions]
    total, most = 0, plan.reach(span)
    starts = starts_of(positions, plan.sees) if w.behind else None
    for (window, queries), layers in Counter(
        zip(w.windows_of(span.layers), w.queries_of(span.layers), strict=True)
    ).items():
        if window is None:
            total += layers * queries * (int(sees.sum()) + chosen * most)
        else:
            first, end = neighbours(positions, sees, window, starts)
            total += layers * queries * (int((end - first).sum()) + chosen * min(2 * window + 1, most))
    return total


def _keys(w: Widths, plan: Plan) -> NDArray[np.int64]:
    """How many positions any row attends to in each layer, [layers]: leading ones, or neighbours of some row."""
    reads = list[int]()
    for span in plan.spans:
        reach = plan.reach(span) if span.cost else 0
        windows = w.windows_of(span.layers)
        reads += [reach if window is None else min(reach, _union(w, plan, span, window)) for window in windows]
    return np.array(reads, dtype=np.int64)


def _union(w: Widths, plan: Plan, span: Span, window: int) -> int:
    """How many positions are neighbours of rows that are computed or may be chosen."""
    rows = span.computed if span.pick is None else span.computed | span.pick.among
    positions, starts = np.flatnonzero(rows), None
    sees: Positions | int = len(rows)
    if w.behind and plan.sees is not None:
        sees, starts = plan.sees[positions], starts_of(positions, plan.sees)
    first, end = neighbours(positions, sees, window, starts)
    return int((end - np.maximum(first, np.concatenate([first[:1], end[:-1]]))).sum())


def _keys_read(
    canvases: Sequence[ExecutedPlan], keys: Sequence[NDArray[np.int64]], near: NDArray[np.bool_]
) -> Positions:
    """Keys that all canvases read in each layer, [layers]; shared ones once, but in layers of neighbours, `near`."""
    unshared, groups = np.zeros(len(near), dtype=np.int64), dict[Hashable, NDArray[np.int64]]()
    for canvas, reach in zip(canvases, keys, strict=True):
        shared = np.zeros_like(reach)
        if canvas.prefix is not None:
            shared[: canvas.prefix.layers] = np.minimum(reach[: canvas.prefix.layers], canvas.prefix.lead)
            shared[near] = 0
            groups[canvas.sharing] = np.maximum(groups.get(canvas.sharing, 0), shared)
        unshared += reach - shared
    return unshared + sum(groups.values())


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One pass in one run of layers. A prefix row is either reused or refreshed there."""

    layers: range  # layers that do the same
    rows: int  # rows computed in each of them, of the prefix or not
    reused: int  # prefix rows whose K/V are read as an earlier pass left them
    leased: int  # rows of `reused` that are read from the prefix store
    # Prefix rows that restart at `layers.start` from a hidden state: the store's boundary state, or one that the
    # request kept itself. They are refreshed too, or leased where that state decides their K/V.
    restored: int
    refreshed: int  # prefix rows whose K/V this pass computes


def layer_work(plan: Plan, prefix: Mask, hit: PrefixHit | None) -> tuple[LayerWork, ...]:
    """The work of `plan` on a canvas whose positions `prefix` [T] are shared; `hit` is what of them the store holds.

    `TopRho` chooses rows on the device: they count in `rows`, and those of the prefix count as reused.
    """
    if hit is not None:
        plan = plan.cut(hit.boundary).cut(hit.layers)
    leased = None if hit is None or hit.copied else hit  # copies may have been computed anew
    work = []
    live: Mask = np.ones_like(plan.predict)  # before layer 0 every row can be embedded
    for span in plan.spans:
        refreshed = int((span.written & prefix).sum())
        reused = int(prefix.sum()) - refreshed
        work.append(
            LayerWork(
                layers=span.layers,
                rows=span.count,
                reused=reused,
                leased=min(reused, leased.length) if leased is not None and span.layers.start < leased.layers else 0,
                restored=int((span.rows & ~live & prefix).sum()),
                refreshed=refreshed,
            )
        )
        live = span.rows
    return tuple(work)
