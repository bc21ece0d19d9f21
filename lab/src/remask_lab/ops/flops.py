"""FLOPs of passes, as PyTorch counts them and as the plans ask for them, and the padding between the two."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from remask.engine.engine import Engine
from remask.model.attention import Attention, Sink
from remask.model.work_list import WorkList
from remask_lab.observe import CostMeter, observe_costs, replace_attention


def flop_counter() -> FlopCounterMode:
    """A context that counts the FLOPs of matrix products (`get_total_flops`), and runs many times slower."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={fused: _fused})


def _fused(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Fused attention on CPUs, which PyTorch's counter does not know, from its inputs' shapes."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (width + value[3])


class PairCount:
    """Counts the pairs of a row and a key that an attention computes. The attention itself stays the same.

    Attributes:
        pairs: pairs computed so far, in all layers. Rows that see different keys may be masked together, so there can
            be more pairs than the plans ask for.
        flops: FLOPs of their products, each pair with the queries of its own layer.
    """

    def __init__(self, inner: Attention) -> None:
        self.inner = inner
        self.pairs = self.flops = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        self.pairs += work.pair_count
        # A pair is two products, of query and key and of weight and value. The sink's value is added elementwise.
        self.flops += 2 * q.shape[1] * q.shape[2] * (2 * work.pair_count + len(q) * (sink is not None))
        return self.inner(q, k, v, work, sink)


class Executed:
    """Counts the FLOPs of an engine's passes from its construction on.

    Attributes:
        meter: the FLOPs that the plans ask for.
        pairs: the pairs that attention computes.
    """

    def __init__(self, engine: Engine) -> None:
        model = engine.model
        self.meter = CostMeter(model.config.widths(model.dtype.itemsize))
        observe_costs(engine, self.meter)
        self.pairs = PairCount(model.attention)
        replace_attention(engine, self.pairs)

    @property
    def flops(self) -> int:
        """FLOPs that the machine ran in all passes, padding and repeated projections included."""
        cost = self.meter.total
        return cost.total.flops - cost.operations["attention"].flops + self.pairs.flops + cost.repeated
