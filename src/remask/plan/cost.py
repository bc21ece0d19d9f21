"""What passes cost: FLOPs and bytes of every operation.

FLOPs are those of matrix products, a multiplication and an addition each, as profilers count them: 2 m n k for [m, k]
times [k, n]. Attention of a row to a key is two such products, of the query with the key and of its weight with the
value. Elementwise work (norms, RoPE, softmax, activations, residuals, sampling) is no product and is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

Operation: TypeAlias = Literal["projections", "attention", "mlp", "head", "selection", "watch"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The matrices of one layer's feed-forward: of a dense MLP, or of a mixture of experts and its shared expert."""

    up: int  # rows of the matrix that leads into the MLP or the shared expert: gate and up, or up alone; 0: none
    intermediate: int  # F, columns of the matrix that leads out of it
    experts: int = 0  # routed experts, which are resident; 0 in a dense layer
    active: int = 0  # routed experts that a row is computed by
    expert_up: int = 0  # as `up` and `intermediate`, of each routed expert
    expert_intermediate: int = 0

    @property
    def inner(self) -> int:
        """Times D: weights that a row is multiplied with, those of the router included."""
        return self.up + self.intermediate + self.experts + self.active * self._expert

    def moved(self, hidden: int) -> int:
        """Numbers that go into and come out of a row's products, where D is `hidden`."""
        units = (self.up > 0) + self.active  # each reads a row and leaves one; the router reads one
        return hidden * (2 * units + (self.experts > 0)) + self.inner

    def read(self, rows: int) -> int:
        """Times D: weights that `rows` rows need at most, because each may choose other experts."""
        used = min(self.experts, rows * self.active)
        return self.up + self.intermediate + self.experts + used * self._expert

    @property
    def _expert(self) -> int:
        return self.expert_up + self.expert_intermediate


@dataclass(frozen=True, slots=True)
class Widths:
    """The sizes of a model that decide what its passes cost."""

    hidden: int  # D
    queries: int  # Q, all query heads together; of layers with windows where these do not have their own
    keys: int  # K, all K/V heads together; the same
    feeds: tuple[FeedForward, ...]  # the feed-forward of each layer
    vocab: int  # V, rows of the head
    sink: bool  # every layer has a learned key and value that all rows attend to
    item: int  # bytes of a number, in weights, K/V and activations
    # How many positions a row sees to each side in each layer; None: all. Left out: everywhere all.
    windows: tuple[int | None, ...] = ()
    dense: bool = False  # predicted rows pass through a square matrix before the head
    behind: bool = False  # windows reach back from the first row of a block, and not to each side of a row
    near: tuple[int, int] | None = None  # Q and K of layers with windows; None: as of all others
    tied: bool = False  # V of layers without windows is made of K, without a product of its own
    # Columns of the MLP through which rows that are denoised take in what was last predicted of them, as the expected
    # embedding; 0: none
    signal: int = 0

    @property
    def layers(self) -> int:
        """Layers."""
        return len(self.feeds)

    def windows_of(self, layers: range) -> tuple[int | None, ...]:
        """Of some consecutive layers, as all below."""
        return self.windows[layers.start : layers.stop] or (None,) * len(layers)

    def queries_of(self, layers: range) -> list[int]:
        """Q of each."""
        return self._widths_of(layers, 0)

    def keys_of(self, layers: range) -> list[int]:
        """K of each."""
        return self._widths_of(layers, 1)

    def projected_of(self, layers: range) -> list[int]:
        """Columns of K and V together that are products, of each."""
        windows = self.windows_of(layers)
        both = zip(windows, self.keys_of(layers), strict=True)
        return [keys * (1 if self.tied and window is None else 2) for window, keys in both]

    def _widths_of(self, layers: range, which: int) -> list[int]:
        plain = self.queries, self.keys
        near = self.near or plain
        return [(plain if window is None else near)[which] for window in self.windows_of(layers)]


@dataclass(frozen=True, slots=True)
class OperationCost:
    """FLOPs and bytes of one operation."""

    flops: int = 0  # of its matrix products
    # Bytes of its matrices, once a pass and layer in which any row needs them. Biases, norms and embeddings are left
    # out. Of routed experts it counts as many as the rows of the pass can choose at most.
    weights: int = 0
    # Bytes of the K and V that any row of a canvas attends to, once a canvas and layer. Canvases that read one shared
    # prefix in place read it once together, but under `batch_invariant`.
    kv_read: int = 0
    kv_written: int = 0  # bytes of the K and V that are written
    states: int = 0  # bytes of cached attention and FFN outputs and of hidden states, read and written
    # Bytes of what goes into and comes out of each product beside these. Scores are not among them: fused attention
    # keeps them on the chip.
    activations: int = 0

    def __add__(self, other: "OperationCost") -> "OperationCost":
        return OperationCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.weights + self.kv_read + self.kv_written + self.states + self.activations


@dataclass(frozen=True, slots=True)
class PassCost:
    """What one or more passes cost."""

    # Cost by operation. "projections" makes Q, K, V and the attention output. "selection" projects the vectors by which
    # rows are chosen (dLLM-Cache). "watch" computes the attention that is watched (Elastic-Cache).
    operations: Mapping[Operation, OperationCost]
    # FLOPs of projections that no plan needs and that the transformer runs because Q, K and V are one product: a second
    # time the vectors by which rows were chosen
    repeated: int = 0

    def __add__(self, other: "PassCost") -> "PassCost":
        both = {name: self.operations[name] + other.operations[name] for name in OPERATIONS}
        return PassCost(both, self.repeated + other.repeated)

    @property
    def total(self) -> OperationCost:
        """All operations together."""
        return sum(self.operations.values(), OperationCost())


NOTHING = PassCost(dict.fromkeys(OPERATIONS, OperationCost()))
