"""Arithmetic in which no row's bits depend on the other rows of a pass, or on where anything is in memory.

PyTorch and the matrix library under it choose a kernel by the shape of a product, and some kernels round differently:
on a CPU in float32, those for one to three rows do. Elementwise functions round differently at the end of a range of
numbers, and threads split the numbers of all rows into ranges. So a row's last bits may depend on how many rows are
before and after it.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.errors import ConfigError
from remask.model.arithmetic import Arithmetic
from remask.model.attention import Attention, Sink
from remask.model.attention_torch import Unit, units_of
from remask.model.config import Activation
from remask.model.quantized import QuantizedMatrix
from remask.model.transformer import Transformer
from remask.model.weights import LayerWeights
from remask.model.work_list import WorkList

TILE = 64  # rows of every product
GRAIN = 32768  # PyTorch computes an elementwise function of fewer numbers on one thread
ALIGNMENT = 64  # bytes; PyTorch allocates at multiples of it
_SHIFTS = (1, 7, 32)  # by which rows of a tile are moved to try them at other places: odd, even, and by half a tile


class TiledArithmetic(Arithmetic):
    """Computes products in tiles of `TILE` rows; the last tile is padded with zeros.

    So the kernel depends on the shape of the weights and the number of threads, but not on the number of rows.
    """

    invariant = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See the base class. The result is a view of a larger tensor if N is not a multiple of `TILE`."""
        row_count = -(-len(x) // TILE) * TILE
        padded = x.new_zeros((row_count, x.shape[1]))
        padded[: len(x)] = x
        out = x.new_empty((row_count, weight.shape[0]))
        for start in range(0, row_count, TILE):
            tile, target = padded[start : start + TILE], out[start : start + TILE]
            if isinstance(weight, QuantizedMatrix):
                target.copy_(F.linear(tile, weight, bias))
            elif bias is None:
                torch.mm(tile, weight.t(), out=target)
            else:
                torch.addmm(bias, tile, weight.t(), out=target)
        return out[: len(x)]

    def grouped_linear(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return self.grouped_linear_loop(x, weights, ends)  # every group has tiles of its own on every device

    def activate_(self, x: Tensor, function: Activation = "silu") -> Tensor:
        for part in _row_parts(x):  # the rows of `x` are not contiguous, so each is a range of its own
            super().activate_(part, function)
        return x

    def sigmoid(self, x: Tensor) -> Tensor:
        out = x.new_empty((len(x), x.shape[1] + 1))[:, :-1]  # rows that are not contiguous, as above
        out.copy_(x)
        for part in _row_parts(out):
            part.sigmoid_()
        return out

    def align(self, x: Tensor) -> Tensor:
        return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()

    def check(self, weights: Iterable[Tensor]) -> None:
        """Raise `ConfigError` if a row's product with one of `weights` [M, K] depends on its place in a tile.

        Tries one matrix of each shape and dtype, with random rows at several places.
        """
        for weight in {(weight.shape, weight.dtype): weight for weight in weights}.values():
            generator = torch.Generator(weight.device).manual_seed(0)
            x = torch.empty((TILE, weight.shape[1]), dtype=weight.dtype, device=weight.device)
            x.normal_(generator=generator)
            expected = self.linear(x, weight)
            for shift in _SHIFTS:
                if not torch.equal(self.linear(x.roll(shift, 0), weight), expected.roll(shift, 0)):
                    raise ConfigError(
                        f"batch_invariant=True cannot be kept here: on {weight.device} with {torch.get_num_threads()} "
                        f"threads, a product of {TILE} rows with a matrix of {weight.dtype} and "
                        f"{weight.shape[0]} x {weight.shape[1]} depends on the place of a row. Use one thread, another "
                        "dtype or another device, or leave batch_invariant out"
                    )


class UnitwiseAttention:
    """Attention of one unit of a list at a time by `inner`, of copies if an address could change the bits.

    No row may be in two units. How many rows and slots a unit has, and their order, must depend on the request alone.
    """

    def __init__(self, inner: Attention, arithmetic: Arithmetic) -> None:
        self.inner = inner
        self.arithmetic = arithmetic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        parts = []
        for unit, unit_work in work.derive(_single_unit_lists, q.device):
            rows = q[unit.rows].clone(memory_format=torch.contiguous_format)
            keys, values = (self.arithmetic.align(kv[unit.keys]) for kv in (k, v))
            parts.append(self.inner(rows, keys, values, unit_work, sink))
        return torch.cat(parts) if parts else q.flatten(1)


def batch_invariant(model: Transformer) -> Transformer:
    """A copy of `model` that shares its weights, and in which no row's bits depend on the other rows of a pass.

    Raises `ConfigError` if the matrix library gives a row other bits at another place, or if the model is spread over
    several processes.
    """
    check_ranks(model.ranks.shard.size)
    arithmetic = TiledArithmetic()
    matrices = list[Tensor]()
    for layer, w in enumerate(model.weights.layers):
        shape = model.config.shape_of(layer)
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # Q is projected separately from K and V, and rows are picked by K or V alone.
        matrices += (w.qkv[:queries], w.qkv[queries:], w.qkv[-keys:], w.out)
        matrices += (*_feed_matrices(w), *_adapter_factors(w, queries, keys))
    signal = model.weights.signal
    arithmetic.check([*matrices, model.weights.head, *([] if signal is None else (signal.gate_up, signal.down))])
    tiled = model.with_attention(UnitwiseAttention(model.attention, arithmetic))
    tiled.arithmetic = arithmetic
    return tiled


def check_ranks(size: int) -> None:
    """Raise `ConfigError` if several processes compute the model, `size` of them."""
    if size > 1:
        raise ConfigError(
            f"batch_invariant=True cannot be kept with tensor_parallel={size}: a sum over processes adds in an order "
            "that depends on a row's place in the batch; leave one of the two out"
        )


def _row_parts(x: Tensor) -> Sequence[Tensor]:
    """`x` [N, K] in parts of whole rows, so small on a CPU that PyTorch computes each on one thread."""
    return torch.split(x, max(1, (GRAIN - 1) // x.shape[1]) if x.device.type == "cpu" else max(1, len(x)))


def _single_unit_lists(work: WorkList, device: torch.device) -> tuple[tuple[Unit, WorkList], ...]:
    """Each unit of `work` with a list that contains it alone, over its own rows and slots."""
    units = units_of(work, device)
    assert all(unit.exclusive for unit in units)
    lists = []
    for _, rows, _, slots, output in work.units.tolist():
        limits = (None if limit is None else limit[output : output + rows] for limit in (work.reach, work.skip))
        lists.append(WorkList.of(rows, slots, *limits))
    return tuple(zip(units, lists, strict=True))


def _adapter_factors(w: LayerWeights, queries: int, keys: int) -> list[Tensor]:
    """The low-rank factors of adapters for a layer's matrices, cut as the matrices are."""
    factors = []
    for name, changes in w.low_rank.items():
        cuts = (slice(queries), slice(queries, None), slice(-keys, None)) if name == "qkv" else (slice(None),)
        for change in changes.values():
            factors += [change.down, *(change.up[cut] for cut in cuts)]
    return factors


def _feed_matrices(w: LayerWeights) -> list[Tensor]:
    """The matrices of a layer's feed-forward; of its experts those of the first one."""
    dense = [] if len(w.gate_up) == 0 else [w.gate_up, w.down]
    return dense if w.mixture is None else [*dense, w.mixture.router, w.mixture.gate_up[0], w.mixture.down[0]]
