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

    up: int  # rows of the input matrix of the MLP or the shared expert: gate and up, or up alone; 0 without either
    intermediate: int  # F, columns of the output matrix
    experts: int = 0  # routed experts; 0 in a dense layer
    active: int = 0  # routed experts that compute a row
    expert_up: int = 0  # `up` of each routed expert
    expert_intermediate: int = 0  # `intermediate` of each routed expert

    @property
    def weights_per_row(self) -> int:
        """Number of weights, divided by D, that a row is multiplied with, those of the router included."""
        return self.up + self.intermediate + self.experts + self.active * self._expert_weights

    def activations(self, hidden: int) -> int:
        """Numbers that the products of a row read and write, with D = `hidden`."""
        mlps = (self.up > 0) + self.active  # each reads and writes a row of D; the router only reads one
        return hidden * (2 * mlps + (self.experts > 0)) + self.weights_per_row

    def weights_read(self, rows: int) -> int:
        """Number of weights, divided by D, that `rows` rows read at most, when they choose different experts."""
        experts = min(self.experts, rows * self.active)
        return self.up + self.intermediate + self.experts + experts * self._expert_weights

    @property
    def _expert_weights(self) -> int:
        return self.expert_up + self.expert_intermediate


@dataclass(frozen=True, slots=True)
class Widths:
    """The sizes of a model that decide what its passes cost."""

    hidden: int  # D
    queries: int  # Q, all query heads together, in layers with full attention
    keys: int  # K, all K/V heads together, in layers with full attention
    feeds: tuple[FeedForward, ...]  # the feed-forward of each layer
    vocab: int  # V, rows of the head
    sink: bool  # every layer has a learned key and value that all rows attend to
    itemsize: int  # bytes of a number, in weights, K/V and activations
    # Of each layer, how many positions a row sees to each side; None: full attention. Empty: full attention everywhere
    windows: tuple[int | None, ...] = ()
    dense: bool = False  # predicted rows pass through a square matrix before the head
    block_windows: bool = False  # windows reach back from the first row of a block, not to each side of a row
    sliding: tuple[int, int] | None = None  # Q and K of layers with windows; None: as of the others
    tied: bool = False  # V of layers with full attention is made of K, without a product of its own
    # F of the MLP of self-conditioning, by which denoised rows take in the expected embedding of their last
    # prediction; 0 without one
    signal: int = 0

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.feeds)

    def windows_of(self, layers: range) -> tuple[int | None, ...]:
        """The window of each of some consecutive layers; None for full attention."""
        return self.windows[layers.start : layers.stop] or (None,) * len(layers)

    def queries_of(self, layers: range) -> list[int]:
        """Q of each of some consecutive layers."""
        return [queries for queries, _ in self._attention_widths(layers)]

    def keys_of(self, layers: range) -> list[int]:
        """K of each of some consecutive layers."""
        return [keys for _, keys in self._attention_widths(layers)]

    def kv_products_of(self, layers: range) -> list[int]:
        """Columns of K and V that matrix products compute, of each of some consecutive layers."""
        columns = []
        for window, keys in zip(self.windows_of(layers), self.keys_of(layers), strict=True):
            columns.append(keys if self.tied and window is None else 2 * keys)
        return columns

    def _attention_widths(self, layers: range) -> list[tuple[int, int]]:
        full = self.queries, self.keys
        sliding = self.sliding or full
        return [full if window is None else sliding for window in self.windows_of(layers)]


@dataclass(frozen=True, slots=True)
class OperationCost:
    """FLOPs and bytes of one operation."""

    flops: int = 0  # of its matrix products
    # Bytes of its matrices, once for each pass and layer in which any row needs them, without biases, norms and
    # embeddings. As many routed experts are counted as the rows of the pass can choose at most.
    weights: int = 0
    # Bytes of the K and V that any row of a canvas attends to, once for each canvas and layer. A prefix that canvases
    # share is counted once for all of them, except under `batch_invariant`.
    kv_read: int = 0
    kv_written: int = 0  # bytes of the K and V that are written
    states: int = 0  # bytes of cached attention and FFN outputs and of hidden states, read and written
    # Bytes of all other inputs and outputs of its products. Attention scores are not counted, as fused attention keeps
    # them on the chip.
    activations: int = 0

    def __add__(self, other: "OperationCost") -> "OperationCost":
        return OperationCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.weights + self.kv_read + self.kv_written + self.states + self.activations


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of one or more passes."""

    # "projections" computes Q, K, V and the attention output. "selection" projects the vectors by which rows are chosen
    # (dLLM-Cache). "watch" computes the attention that is watched (Elastic-Cache).
    operations: Mapping[Operation, OperationCost]
    # FLOPs of projections that no plan needs: the vectors by which rows were chosen are projected again, because the
    # transformer computes Q, K and V as one product
    repeated: int = 0

    def __add__(self, other: "PassCost") -> "PassCost":
        operations = {name: self.operations[name] + other.operations[name] for name in OPERATIONS}
        return PassCost(operations, self.repeated + other.repeated)

    @property
    def total(self) -> OperationCost:
        """All operations together."""
        return sum(self.operations.values(), OperationCost())


NOTHING = PassCost(dict.fromkeys(OPERATIONS, OperationCost()))
