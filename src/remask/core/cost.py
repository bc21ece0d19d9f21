"""What passes cost: FLOPs and bytes of every operation, from plans alone.

FLOPs are those of matrix products, a multiplication and an addition each, as profilers count them: 2 m n k for [m, k]
times [k, n]. Attention of a row to a key is two such products, of the query with the key and of its weight with the
value. Elementwise work (norms, RoPE, softmax, activations, residuals, sampling) is no product and is not counted.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from remask.core.plan import Mask, Plan, PrefixHit, Span

Operation: TypeAlias = Literal["projections", "attention", "mlp", "head", "watch"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True, slots=True)
class Widths:
    """What of a model decides what its passes cost.

    Attributes:
        layers: number of layers.
        hidden: D.
        queries: Q, all query heads together.
        keys: K, all K/V heads together.
        up: rows of the matrix that leads into the MLP: gate and up, or up alone.
        intermediate: F.
        vocab: V, rows of the head.
        sink: every layer has a learned key and value that all rows attend to.
        item: bytes of a number, in weights, K/V and activations.
    """

    layers: int
    hidden: int
    queries: int
    keys: int
    up: int
    intermediate: int
    vocab: int
    sink: bool
    item: int


@dataclass(frozen=True, slots=True)
class OperationCost:
    """FLOPs and bytes of one operation.

    Attributes:
        flops: of its matrix products.
        weights: bytes of its matrices, once a pass and layer in which any row is computed. Biases, norms and embeddings
            are left out.
        kv_read: bytes of the K and V that any row of a canvas attends to, once a canvas and layer. Canvases that read
            one shared prefix in place read it once together.
        kv_written: bytes of the K and V that are written.
        states: bytes of cached attention and FFN outputs and of hidden states, read and written.
        activations: bytes of what goes into and comes out of each product beside these. Scores are not among them:
            fused attention keeps them on the chip.
    """

    flops: int = 0
    weights: int = 0
    kv_read: int = 0
    kv_written: int = 0
    states: int = 0
    activations: int = 0

    def __add__(self, other: "OperationCost") -> "OperationCost":
        return OperationCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.weights + self.kv_read + self.kv_written + self.states + self.activations


@dataclass(frozen=True, slots=True)
class PassCost:
    """What one or more passes cost.

    Attributes:
        operations: what the plans ask for. "projections" are those of Q, K, V and the attention output, "watch" is
            looking at attention (Elastic-Cache).
        repeated: FLOPs of projections that the transformer runs beyond that, as its product is one: K and V of frozen
            rows, and once more what was compared to choose rows.
    """

    operations: Mapping[Operation, OperationCost]
    repeated: int = 0

    def __add__(self, other: "PassCost") -> "PassCost":
        both = {name: self.operations[name] + other.operations[name] for name in OPERATIONS}
        return PassCost(both, self.repeated + other.repeated)

    @property
    def total(self) -> OperationCost:
        """All operations together."""
        return sum(self.operations.values(), OperationCost())

    @property
    def intensity(self) -> float:
        """FLOPs a byte; 0 where nothing is computed."""
        total = self.total
        return total.flops / total.bytes if total.bytes else 0.0


NOTHING = PassCost(dict.fromkeys(OPERATIONS, OperationCost()))


@dataclass(frozen=True, slots=True)
class Passed:
    """A canvas' part in a pass.

    Attributes:
        plan: the one that ran.
        prefix: what others computed of the canvas.
        sharing: equal for canvases that read the same such prefix.
        outputs: attention and FFN outputs of computed rows are kept.
        tracked: its attention was watched before, so that there is a token to look at in every layer.
    """

    plan: Plan
    prefix: PrefixHit | None = None
    sharing: Hashable = None
    outputs: bool = False
    tracked: bool = False


def pass_cost(widths: Widths, canvases: Sequence[Passed]) -> PassCost:
    """What one pass over `canvases` costs."""
    total = sum((_canvas_cost(widths, each) for each in canvases), NOTHING)
    keys = [_keys(each.plan) for each in canvases]
    active = int(np.any([reach > 0 for reach in keys], axis=0).sum()) if keys else 0
    watching = max((each.plan.layers - 1 for each in canvases if each.plan.watch is not None), default=0)
    predicts = any(each.plan.predict.any() for each in canvases)
    w, w_read = widths, widths.item * widths.hidden
    weights: dict[Operation, int] = {
        "projections": w_read * active * 2 * (w.queries + w.keys),
        "attention": w.item * active * 2 * w.keys * w.sink,
        "mlp": w_read * active * (w.up + w.intermediate),
        "head": w_read * predicts * w.vocab,
        "watch": w_read * watching * w.queries,
    }
    reads = dict.fromkeys(OPERATIONS, 0) | {"attention": w.item * 2 * w.keys * _keys_read(canvases, keys)}
    both = {name: OperationCost(weights=weights[name], kv_read=reads[name]) for name in OPERATIONS}
    return total + PassCost(both)


def _canvas_cost(w: Widths, each: Passed) -> PassCost:
    """What one canvas adds to a pass: all but weights, and K and V that attention reads."""
    plan, length = each.plan, len(each.plan.predict)
    projections = attention = mlp = OperationCost()
    repeated = 0
    live: Mask = np.ones(length, dtype=np.bool_)  # before layer 0 every row can be embedded
    for span in plan.spans:
        fixed, pairs = _attended(plan, span)
        looked, chosen = (0, 0) if span.pick is None else (int(span.pick.among.sum()), span.pick.count)
        frozen = 0 if span.frozen is None else int((span.frozen & span.computed).sum())
        rows, layers = fixed + chosen, len(span.layers)
        # Of the rows looked at one of K and V is projected, of the chosen ones the other too.
        sides = 2 * (fixed - frozen) + looked + chosen
        restored = int((span.rows & ~live).sum()) + (0 if span.save is None else int(span.save.sum()))
        # A row that is not computed adds its cached outputs, and one that is leaves them.
        kept = 2 * int(span.rows.sum()) * each.outputs
        projections += OperationCost(
            flops=layers * 2 * w.hidden * (2 * rows * w.queries + sides * w.keys),
            kv_written=layers * w.item * sides * w.keys,
            states=w.item * w.hidden * (restored + layers * kept),
            activations=layers * w.item * ((rows + fixed + looked) * w.hidden + 2 * rows * w.queries),
        )
        repeated += layers * 2 * w.hidden * w.keys * (2 * frozen + chosen)
        # The sink's value is added elementwise.
        attention += OperationCost(
            flops=layers * 2 * w.queries * (2 * pairs + rows * w.sink),
            activations=layers * w.item * 2 * rows * w.queries,
        )
        mlp += OperationCost(
            flops=layers * 2 * rows * w.hidden * (w.up + w.intermediate),
            activations=layers * w.item * rows * (2 * w.hidden + w.up + w.intermediate),
        )
        live = span.rows
    predicted = int(plan.predict.sum())
    head = OperationCost(
        flops=2 * predicted * w.hidden * w.vocab, activations=w.item * predicted * (w.hidden + w.vocab)
    )
    operations: dict[Operation, OperationCost] = {"projections": projections, "attention": attention, "mlp": mlp}
    return PassCost({**operations, "head": head, "watch": _watch(w, each)}, repeated)


def _attended(plan: Plan, span: Span) -> tuple[int, int]:
    """Rows that are computed in any case, and pairs of a row and a key that it attends to, chosen rows included."""
    computed = span.computed
    rows, chosen = int(computed.sum()), 0 if span.pick is None else span.pick.count
    if plan.sees is None:
        return rows, (rows + chosen) * len(computed)
    return rows, int(plan.sees[computed].sum()) + chosen * len(computed)


def _keys(plan: Plan) -> NDArray[np.int64]:
    """How many leading positions any row attends to in each layer, [layers]."""
    reach = [plan.reach(span.computed) if span.cost else 0 for span in plan.spans]
    return np.repeat(np.array(reach, dtype=np.int64), [len(span.layers) for span in plan.spans])


def _keys_read(canvases: Sequence[Passed], keys: Sequence[NDArray[np.int64]]) -> int:
    """Keys that all canvases read in all layers; what is shared in place is read once."""
    own, groups = 0, dict[Hashable, NDArray[np.int64]]()
    for each, reach in zip(canvases, keys, strict=True):
        shared = np.zeros_like(reach)
        if each.prefix is not None:
            shared[: each.prefix.boundary] = np.minimum(reach[: each.prefix.boundary], each.prefix.length)
            groups[each.sharing] = np.maximum(groups.get(each.sharing, 0), shared)
        own += int((reach - shared).sum())
    return own + sum(int(read.sum()) for read in groups.values())


def _watch(w: Widths, each: Passed) -> OperationCost:
    """After all layers but the last, attention of the window and of the tracked token, then of the next one to track.

    Queries are projected again, from the rows' inputs; their scores are products, what they weigh is not looked at.
    """
    if each.plan.watch is None:
        return OperationCost()
    length, layers = len(each.plan.predict), each.plan.layers - 1
    rows = int(each.plan.watch.window.sum()) + each.tracked + 1
    return OperationCost(
        flops=layers * 2 * rows * w.queries * (w.hidden + length),
        kv_read=layers * w.item * 2 * length * w.keys,
        activations=layers * w.item * rows * (w.hidden + w.queries),
    )


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

    def note(self, canvases: Sequence[Passed]) -> None:
        """Take in a pass."""
        self.last = pass_cost(self.widths, canvases)
        self.total += self.last
        self.passes += 1
