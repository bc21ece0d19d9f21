"""The cost of a pass, from its plans alone."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.plan.cost import NOTHING, OPERATIONS, Operation, OperationCost, PassCost, Widths
from remask.plan.hooks import HookCost
from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Mask, Span


@dataclass(frozen=True, slots=True)
class ExecutedPlan:
    """A canvas' part in a pass.

    Attributes:
        plan: the plan that ran.
        prefix: the positions that other requests computed, where canvases that share them read leading ones together.
        sharing: equal for canvases that read the same prefix.
        outputs: attention and FFN outputs of computed rows are kept.
    """

    plan: Plan
    prefix: PrefixHit | None = None
    sharing: Hashable = None
    outputs: bool = False


def pass_cost(widths: Widths, canvases: Sequence[ExecutedPlan]) -> PassCost:
    """What one pass over `canvases` costs."""
    total = sum((_canvas_cost(widths, each) for each in canvases), NOTHING)
    keys = [_keys(each.plan) for each in canvases]
    active = int(np.any([reach > 0 for reach in keys], axis=0).sum()) if keys else 0
    fed = [_fed(each.plan) for each in canvases]
    spans = [span for each in canvases for span in each.plan.spans]
    choosing = {(layer, span.pick.by) for span in spans if span.pick is not None for layer in _choosing(span)}
    hooks = [each.plan.hook.cost(widths, each.plan.spans) for each in canvases if each.plan.hook is not None]
    choosing |= {compared for each in hooks for compared in each.compares}
    watching = max((each.looks for each in hooks), default=0)
    predicts = any(each.plan.predict.any() for each in canvases)
    w, w_read = widths, widths.item * widths.hidden
    weights: dict[Operation, int] = {
        "projections": w_read * active * 2 * (w.queries + w.keys),
        "attention": w.item * active * 2 * w.keys * w.sink,
        "mlp": w_read * sum(feed.read(sum(rows)) for feed, *rows in zip(w.feeds, *fed, strict=True) if any(rows)),
        "head": w_read * predicts * w.vocab,
        "selection": w_read * len(choosing) * w.keys,
        "watch": w_read * watching * w.queries,
    }
    reads = dict.fromkeys(OPERATIONS, 0) | {"attention": w.item * 2 * w.keys * _keys_read(canvases, keys)}
    both = {name: OperationCost(weights=weights[name], kv_read=reads[name]) for name in OPERATIONS}
    return total + PassCost(both)


def _canvas_cost(w: Widths, each: ExecutedPlan) -> PassCost:
    """What one canvas adds to a pass: all but weights, and K and V that attention reads."""
    plan, length = each.plan, len(each.plan.predict)
    projections = attention = mlp = selection = OperationCost()
    repeated = 0
    live: Mask = np.ones(length, dtype=np.bool_)  # before layer 0 every row can be embedded
    for span in plan.spans:
        fixed, pairs = _attended(plan, span)
        looked, chosen = (0, 0) if span.pick is None else (int(span.pick.among.sum()), span.pick.count)
        frozen = 0 if span.frozen is None else int((span.frozen & span.computed).sum())
        rows, layers = fixed + chosen, len(span.layers)
        compared = len(_choosing(span))
        # Where rows are chosen K or V of these is there already.
        sides = layers * 2 * (fixed - frozen + chosen) - compared * chosen
        restored = int((span.rows & ~live).sum()) + (0 if span.save is None else int(span.save.sum()))
        # A row that is not computed adds its cached outputs, and one that is leaves them.
        kept = 2 * int(span.rows.sum()) * each.outputs
        projections += OperationCost(
            flops=2 * w.hidden * (layers * 2 * rows * w.queries + sides * w.keys),
            kv_written=w.item * sides * w.keys,
            states=w.item * w.hidden * (restored + layers * kept),
            activations=layers * w.item * 2 * rows * (w.hidden + w.queries),
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
            flops=layers * 2 * w.queries * (2 * pairs + rows * w.sink),
            activations=layers * w.item * 2 * rows * w.queries,
        )
        feeds = w.feeds[span.layers.start : span.layers.stop]
        mlp += OperationCost(
            flops=2 * rows * w.hidden * sum(feed.inner for feed in feeds),
            activations=w.item * rows * sum(feed.moved(w.hidden) for feed in feeds),
        )
        live = span.rows
    predicted = int(plan.predict.sum())
    head = OperationCost(
        flops=2 * predicted * w.hidden * w.vocab, activations=w.item * predicted * (w.hidden + w.vocab)
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
    """The layers in which rows of the span are chosen."""
    pick = span.pick
    return [] if pick is None else [layer for layer in span.layers if (layer - pick.first) % pick.every == 0]


def _attended(plan: Plan, span: Span) -> tuple[int, int]:
    """Rows that are computed in any case, and pairs of a row and a key that it attends to, chosen rows included."""
    computed = span.computed
    rows, chosen = int(computed.sum()), 0 if span.pick is None else span.pick.count
    if plan.sees is None:
        return rows, (rows + chosen) * len(computed)
    return rows, int(plan.sees[computed].sum()) + chosen * plan.reach(span)


def _fed(plan: Plan) -> list[int]:
    """Rows that are computed in each layer."""
    rows = [int(span.computed.sum()) + (0 if span.pick is None else span.pick.count) for span in plan.spans]
    return [count for count, span in zip(rows, plan.spans, strict=True) for _ in span.layers]


def _keys(plan: Plan) -> NDArray[np.int64]:
    """How many leading positions any row attends to in each layer, [layers]."""
    reach = [plan.reach(span) if span.cost else 0 for span in plan.spans]
    return np.repeat(np.array(reach, dtype=np.int64), [len(span.layers) for span in plan.spans])


def _keys_read(canvases: Sequence[ExecutedPlan], keys: Sequence[NDArray[np.int64]]) -> int:
    """Keys that all canvases read in all layers. A prefix that several canvases read in place counts once."""
    own, groups = 0, dict[Hashable, NDArray[np.int64]]()
    for each, reach in zip(canvases, keys, strict=True):
        shared = np.zeros_like(reach)
        if each.prefix is not None:
            shared[: each.prefix.layers] = np.minimum(reach[: each.prefix.layers], each.prefix.lead)
            groups[each.sharing] = np.maximum(groups.get(each.sharing, 0), shared)
        own += int((reach - shared).sum())
    return own + sum(int(read.sum()) for read in groups.values())


@dataclass(slots=True)
class CostMeter:
    """Costs of the passes of an engine, summed up.

    Attributes:
        widths: of its model.
        total: of all passes noted.
        last: of the last one.
        passes: how many were noted.
    """

    widths: Widths
    total: PassCost = NOTHING
    last: PassCost = NOTHING
    passes: int = 0

    def note(self, canvases: Sequence[ExecutedPlan]) -> None:
        """Take in a pass."""
        self.last = pass_cost(self.widths, canvases)
        self.total += self.last
        self.passes += 1
