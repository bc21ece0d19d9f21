"""The cost of a pass, and what it computes and reuses of a shared prefix, derived from plans alone."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.plan.cost import OPERATIONS, Operation, OperationCost, PassCost, Widths
from remask.plan.hooks import HookCost
from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Mask, Positions, Span, neighbours, starts_of


@dataclass(frozen=True, slots=True)
class ExecutedPlan:
    """A canvas and its plan in a pass that ran."""

    plan: Plan
    prefix: PrefixHit | None = None  # leading positions that canvases with equal `sharing_key` read together
    sharing_key: Hashable = None  # equal for canvases that read the same prefix
    keeps_outputs: bool = False  # attention and FFN outputs of computed rows are kept
    noisy_count: int = 0  # rows of the first layer that are denoised


def pass_cost(widths: Widths, canvases: Sequence[ExecutedPlan]) -> PassCost:
    """The cost of one pass over `canvases`."""
    layers = range(widths.layers)
    reaches = [_keys_by_layer(widths, canvas.plan) for canvas in canvases]
    active = np.any([reach > 0 for reach in reaches], axis=0) if reaches else np.False_  # layers with computed rows
    weights = _weight_bytes(widths, canvases, active)
    operations = {name: OperationCost(weights=weights[name]) for name in OPERATIONS}
    sliding = np.array([window is not None for window in widths.windows_of(layers)])
    keys = np.array(widths.keys_of(layers)) * _total_keys(canvases, reaches, sliding)
    operations["attention"] += OperationCost(kv_read=widths.itemsize * 2 * int(keys.sum()))
    return sum((_canvas_cost(widths, canvas) for canvas in canvases), PassCost(operations))


def _weight_bytes(
    widths: Widths, canvases: Sequence[ExecutedPlan], active: NDArray[np.bool_] | np.bool_
) -> dict[Operation, int]:
    """Bytes of the matrices that each operation of a pass reads, if rows are computed in the layers `active`, [layers].

    A matrix is read once in a pass, however many canvases need it.
    """
    layers = range(widths.layers)
    selections = set[tuple[int, str]]()  # layers in which rows are compared, each with what is compared
    watches = 0
    for canvas in canvases:
        for span in canvas.plan.spans:
            if span.pick is not None:
                selections.update((layer, span.pick.by) for layer in _selection_layers(span))
        if canvas.plan.hook is not None:
            hook_cost = canvas.plan.hook.cost(widths, canvas.plan.spans)
            selections |= hook_cost.compares
            watches = max(watches, hook_cost.looks)
    rows_by_layer = [[span.count for span in canvas.plan.spans for _ in span.layers] for canvas in canvases]
    mlp_weights = 0
    for feed, *rows in zip(widths.feeds, *rows_by_layer, strict=True):
        if any(rows):
            mlp_weights += feed.weights_read(sum(rows))
    predicts = any(canvas.plan.predict.any() for canvas in canvases)
    denoises = any(canvas.noisy_count for canvas in canvases)
    keys = np.array(widths.keys_of(layers))
    qkv_columns = int(((2 * np.array(widths.queries_of(layers)) + widths.kv_products_of(layers)) * active).sum())
    # Self-conditioning reads the embedding too, to compute the expected one of predicted rows.
    head_columns = widths.vocab * (2 if widths.signal else 1) + widths.dense * widths.hidden
    row_bytes = widths.itemsize * widths.hidden
    return {
        "projections": row_bytes * qkv_columns,
        "attention": widths.itemsize * 2 * int((keys * active).sum()) * widths.sink,
        "mlp": row_bytes * (mlp_weights + denoises * 3 * widths.signal),
        "head": row_bytes * predicts * head_columns,
        "selection": row_bytes * len(selections) * widths.keys,
        "watch": row_bytes * watches * widths.queries,
    }


def _canvas_cost(widths: Widths, canvas: ExecutedPlan) -> PassCost:
    """The cost that one canvas adds to a pass, without weights and the K and V that attention reads."""
    plan = canvas.plan
    length = len(plan.predict)
    projections = attention = mlp = selection = OperationCost()
    repeated = 0
    live: Mask = np.ones(length, dtype=np.bool_)  # before layer 0 every row can be embedded
    for span in plan.spans:
        candidates = 0 if span.pick is None else int(span.pick.candidates.sum())
        pick_count = 0 if span.pick is None else span.pick.count
        row_count = span.count
        layer_count = len(span.layers)
        selection_count = len(_selection_layers(span))
        queries = sum(widths.queries_of(span.layers))
        write_count = int(span.written.sum()) + pick_count
        selected_numbers = selection_count * pick_count * widths.keys  # K or V of chosen rows, projected to choose them
        written_numbers = sum(widths.keys_of(span.layers)) * 2 * write_count - selected_numbers
        restored = int((span.rows & ~live).sum()) + (0 if span.save is None else int(span.save.sum()))
        # A row that is not computed reads its cached outputs, and a computed one writes them.
        output_count = 2 * int(span.rows.sum()) * canvas.keeps_outputs
        kv_products = sum(widths.kv_products_of(span.layers)) * write_count - selected_numbers
        projections += OperationCost(
            flops=2 * widths.hidden * (2 * row_count * queries + kv_products),
            kv_written=widths.itemsize * written_numbers,
            states=widths.itemsize * widths.hidden * (restored + layer_count * output_count),
            activations=widths.itemsize * 2 * row_count * (layer_count * widths.hidden + queries),
        )
        repeated += 2 * widths.hidden * selected_numbers
        selection += OperationCost(
            flops=selection_count * 2 * candidates * widths.hidden * widths.keys,
            kv_read=selection_count * widths.itemsize * candidates * widths.keys,
            kv_written=selection_count * widths.itemsize * candidates * widths.keys,
            activations=selection_count * widths.itemsize * candidates * widths.hidden,
        )
        # The sink's value is added elementwise.
        attention += OperationCost(
            flops=2 * (2 * _attention_products(widths, plan, span) + queries * row_count * widths.sink),
            activations=widths.itemsize * 2 * row_count * queries,
        )
        feeds = widths.feeds[span.layers.start : span.layers.stop]
        mlp += OperationCost(
            flops=2 * row_count * widths.hidden * sum(feed.weights_per_row for feed in feeds),
            activations=widths.itemsize * row_count * sum(feed.activations(widths.hidden) for feed in feeds),
        )
        live = span.rows
    predicted = int(plan.predict.sum())
    head = OperationCost(
        flops=2 * predicted * widths.hidden * (widths.vocab + widths.dense * widths.hidden),
        activations=widths.itemsize * predicted * (widths.hidden + widths.vocab + 2 * widths.dense * widths.hidden),
    )
    if widths.signal:
        head += OperationCost(
            flops=2 * predicted * widths.hidden * widths.vocab,
            states=widths.itemsize * predicted * widths.hidden,
            activations=widths.itemsize * predicted * widths.vocab,
        )
        mlp += OperationCost(
            flops=2 * canvas.noisy_count * widths.hidden * 3 * widths.signal,
            states=widths.itemsize * canvas.noisy_count * widths.hidden,
            activations=widths.itemsize * canvas.noisy_count * (widths.hidden + 3 * widths.signal),
        )
    hook = HookCost() if plan.hook is None else plan.hook.cost(widths, plan.spans)
    operations: dict[Operation, OperationCost] = {
        "projections": projections,
        "attention": attention,
        "mlp": mlp,
        "head": head,
        "selection": selection + hook.selection,
        "watch": hook.watch,
    }
    return PassCost(operations, repeated)


def _selection_layers(span: Span) -> list[int]:
    """The layers of `span` in which its pick is made anew."""
    pick = span.pick
    return [] if pick is None else [layer for layer in span.layers if (layer - pick.first) % pick.every == 0]


def _attention_products(widths: Widths, plan: Plan, span: Span) -> int:
    """Pairs of a computed row and a key that it sees, times Q, summed over the layers of a span.

    Which rows a pick chooses is not known, so each of these is assumed to see as many keys as any row can.
    """
    positions = np.flatnonzero(span.computed)
    pick_count = 0 if span.pick is None else span.pick.count
    sees = np.full(len(positions), len(span.rows)) if plan.sees is None else plan.sees[positions]
    reach = plan.reach(span)
    starts = starts_of(positions, plan.sees) if widths.block_windows else None
    layer_counts = Counter(zip(widths.windows_of(span.layers), widths.queries_of(span.layers), strict=True))
    products = 0
    for (window, queries), layer_count in layer_counts.items():
        if window is None:
            products += layer_count * queries * (int(sees.sum()) + pick_count * reach)
        else:
            first, end = neighbours(positions, sees, window, starts)
            products += layer_count * queries * (int((end - first).sum()) + pick_count * min(2 * window + 1, reach))
    return products


def _keys_by_layer(widths: Widths, plan: Plan) -> NDArray[np.int64]:
    """How many positions of a canvas any row attends to in each layer, int64 [layers]."""
    counts = list[int]()
    for span in plan.spans:
        reach = plan.reach(span) if span.cost else 0
        for window in widths.windows_of(span.layers):
            counts.append(reach if window is None else min(reach, _keys_in_windows(widths, plan, span, window)))
    return np.array(counts, dtype=np.int64)


def _keys_in_windows(widths: Widths, plan: Plan, span: Span, window: int) -> int:
    """How many positions are within the window of a row that is computed or may be chosen."""
    rows = span.computed if span.pick is None else span.computed | span.pick.candidates
    positions = np.flatnonzero(rows)
    starts = None
    sees: Positions | int = len(rows)
    if widths.block_windows and plan.sees is not None:
        sees = plan.sees[positions]
        starts = starts_of(positions, plan.sees)
    first, end = neighbours(positions, sees, window, starts)
    return int((end - np.maximum(first, np.concatenate([first[:1], end[:-1]]))).sum())


def _total_keys(
    canvases: Sequence[ExecutedPlan], reaches: Sequence[NDArray[np.int64]], sliding: NDArray[np.bool_]
) -> Positions:
    """Keys that all canvases read in each layer, int64 [layers]. `reaches` are those of each canvas, [layers].

    Shared ones count once, except in `sliding` layers, in which every canvas reads its own windows.
    """
    unshared = np.zeros(len(sliding), dtype=np.int64)
    shared_by_group = dict[Hashable, NDArray[np.int64]]()
    for canvas, reach in zip(canvases, reaches, strict=True):
        shared = np.zeros_like(reach)
        if canvas.prefix is not None:
            shared[: canvas.prefix.layers] = np.minimum(reach[: canvas.prefix.layers], canvas.prefix.lead)
            shared[sliding] = 0
            shared_by_group[canvas.sharing_key] = np.maximum(shared_by_group.get(canvas.sharing_key, 0), shared)
        unshared += reach - shared
    return unshared + sum(shared_by_group.values())


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one pass in a run of layers. A prefix row is either reused or refreshed there."""

    layers: range
    rows: int  # rows computed in each of them, of the prefix or not
    reused: int  # prefix rows whose K/V an earlier pass has computed
    leased: int  # rows of `reused` that are read from the prefix store
    # Prefix rows that restart at `layers.start` from a hidden state: the store's boundary state, or one that the
    # request saved. They are refreshed too, or leased if the store has the K/V that follow from that state.
    restored: int
    refreshed: int  # prefix rows whose K/V this pass computes


def layer_work(plan: Plan, prefix: Mask, hit: PrefixHit | None) -> tuple[LayerWork, ...]:
    """The work of `plan` on a canvas whose positions `prefix` [T] are shared, of which the store holds `hit`.

    Rows that `TopRho` chooses on the device count in `rows`; if they belong to the prefix, they count as reused.
    """
    if hit is not None:
        plan = plan.cut(hit.boundary).cut(hit.layers)
    work = []
    live: Mask = np.ones_like(plan.predict)  # before layer 0 every row can be embedded
    for span in plan.spans:
        refreshed = int((span.written & prefix).sum())
        reused = int(prefix.sum()) - refreshed
        # Rows of a copied prefix may have been computed anew, so none of them counts as leased.
        is_leased = hit is not None and not hit.copied and span.layers.start < hit.layers
        work.append(
            LayerWork(
                layers=span.layers,
                rows=span.count,
                reused=reused,
                leased=min(reused, hit.length) if hit is not None and is_leased else 0,
                restored=int((span.rows & ~live & prefix).sum()),
                refreshed=refreshed,
            )
        )
        live = span.rows
    return tuple(work)
