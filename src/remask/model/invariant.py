"""Computing so that no row's bits depend on the other rows of a pass, nor on where anything is in memory.

PyTorch and the matrix library under it choose a kernel by the shape of a product, and some kernels round differently:
on a CPU in float32, products of one to three rows do. Elementwise functions round differently where a range of numbers
ends, and threads split the numbers of all rows into ranges. So a row's last bits may depend on how many rows
stand before and after it.
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
from remask.model.quantised import QuantisedMatrix
from remask.model.transformer import Transformer
from remask.model.weights import LayerWeights
from remask.model.work_list import WorkList

TILE = 64  # rows of every product
GRAIN = 32768  # PyTorch computes an elementwise function of fewer numbers on one thread
ALIGNMENT = 64  # bytes; PyTorch allocates at multiples of it


class TiledArithmetic(Arithmetic):
    """Computes products in tiles of `TILE` rows, of which the last is filled up with zeros.

    So the kernel depends on the shape of the weights and on the number of threads, and not on how many rows there are.
    """

    invariant = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = -(-len(x) // TILE) * TILE
        padded = x.new_zeros((rows, x.shape[1]))
        padded[: len(x)] = x
        out = x.new_empty((rows, weight.shape[0]))
        for start in range(0, rows, TILE):
            tile, target = padded[start : start + TILE], out[start : start + TILE]
            if isinstance(weight, QuantisedMatrix):
                target.copy_(F.linear(tile, weight, bias))
            elif bias is None:
                torch.mm(tile, weight.t(), out=target)
            else:
                torch.addmm(bias, tile, weight.t(), out=target)
        return out[: len(x)]

    def grouped(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return self.by_group(x, weights, ends)  # every group has tiles of its own on every device

    def activate_(self, x: Tensor, of: Activation = "silu") -> Tensor:
        for part in _few_rows(x):  # the rows of `x` are not side by side in memory, so each is a range of its own
            super().activate_(part, of)
        return x

    def sigmoid(self, x: Tensor) -> Tensor:
        apart = x.new_empty((len(x), x.shape[1] + 1))[:, :-1]  # rows that are not side by side, as above
        apart.copy_(x)
        for part in _few_rows(apart):
            part.sigmoid_()
        return apart

    def placed(self, x: Tensor) -> Tensor:
        return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()

    def check(self, weights: Iterable[Tensor]) -> None:
        """Raise `ConfigError` where a row's product with one of `weights` [M, K] depends on its place in a tile.

        One matrix of each shape is tried, with random rows at several places.
        """
        for weight in {(weight.shape, weight.dtype): weight for weight in weights}.values():
            generator = torch.Generator(weight.device).manual_seed(0)
            x = torch.empty((TILE, weight.shape[1]), dtype=weight.dtype, device=weight.device)
            x.normal_(generator=generator)
            first = self.linear(x, weight)
            for by in (1, 7, 32):
                if not torch.equal(self.linear(x.roll(by, 0), weight), first.roll(by, 0)):
                    raise ConfigError(
                        f"batch_invariant=True cannot be kept here: on {weight.device} with {torch.get_num_threads()} "
                        f"threads, a product of {TILE} rows with a matrix of {weight.dtype} and "
                        f"{weight.shape[0]} x {weight.shape[1]} depends on the place of a row. Use one thread, another "
                        "dtype or another device, or leave batch_invariant out"
                    )


class ApartAttention:
    """Attention of one canvas at a time by `inner`, from copies wherever an address could change the bits.

    It takes lists in which no row stands in two units: the number of a unit's rows, the number of its slots and their
    order come from the request.
    """

    def __init__(self, inner: Attention, arithmetic: Arithmetic) -> None:
        self.inner, self.arithmetic = inner, arithmetic

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        parts = []
        for unit, alone in work.once(_one_by_one, q.device):
            rows = q[unit.rows].clone(memory_format=torch.contiguous_format)
            keys, values = (self.arithmetic.placed(cache[unit.keys]) for cache in (k, v))
            parts.append(self.inner(rows, keys, values, alone, sink))
        return torch.cat(parts) if parts else q.flatten(1)


def batch_invariant(model: Transformer) -> Transformer:
    """The same weights, computed so that no row's bits depend on the other rows of a pass.

    Raises `ConfigError` where the matrix library gives a row other bits at another place, or the model is spread over
    several processes.
    """
    check_ranks(model.ranks.shard.size)
    arithmetic = TiledArithmetic()
    matrices = list[Tensor]()
    for layer, w in enumerate(model.weights.layers):
        shape = model.config.shape_of(layer)
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # Q is projected separately from K and V, and choosing rows projects K or V alone.
        matrices += (w.qkv[:queries], w.qkv[queries:], w.qkv[-keys:], w.out)
        matrices += (*_feed_matrices(w), *_factors(w, queries, keys))
    signal = model.weights.signal
    arithmetic.check([*matrices, model.weights.head, *([] if signal is None else (signal.gate_up, signal.down))])
    tiled = model.with_attention(ApartAttention(model.attention, arithmetic))
    tiled.arithmetic = arithmetic
    return tiled


def check_ranks(size: int) -> None:
    """Raise `ConfigError` where `size` processes compute the model."""
    if size > 1:
        raise ConfigError(
            f"batch_invariant=True cannot be kept with tensor_parallel={size}: a sum over processes adds in an order "
            "that depends on a row's place in the batch; leave one of the two out"
        )


def _few_rows(x: Tensor) -> Sequence[Tensor]:
    """`x` in parts of so few rows that no thread takes a part of one."""
    # Threads would split the rows' numbers into ranges that end within a row.
    return torch.split(x, max(1, (GRAIN - 1) // x.shape[1]) if x.device.type == "cpu" else max(1, len(x)))


def _one_by_one(work: WorkList, device: torch.device) -> tuple[tuple[Unit, WorkList], ...]:
    """The units of `work`, and for each a list of its own, over its rows and slots alone."""
    units = units_of(work, device)
    assert all(unit.alone for unit in units)
    lists = []
    for _, rows, _, slots, output in work.units.tolist():
        limits = (None if limit is None else limit[output : output + rows] for limit in (work.reach, work.skip))
        lists.append(WorkList.of(rows, slots, *limits))
    return tuple(zip(units, lists, strict=True))


def _factors(w: LayerWeights, queries: int, keys: int) -> list[Tensor]:
    """The factors that adapters add to a layer's matrices, cut as these are."""
    factors = []
    for name, changes in w.low_rank.items():
        cuts = (slice(queries), slice(queries, None), slice(-keys, None)) if name == "qkv" else (slice(None),)
        for change in changes.values():
            factors += [change.down, *(change.up[cut] for cut in cuts)]
    return factors


def _feed_matrices(w: LayerWeights) -> list[Tensor]:
    """The matrices of a layer's feed-forward, one expert's among them."""
    dense = [] if len(w.gate_up) == 0 else [w.gate_up, w.down]
    return dense if w.mixture is None else [*dense, w.mixture.router, w.mixture.gate_up[0], w.mixture.down[0]]
