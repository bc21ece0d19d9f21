"""FLOPs of passes: as PyTorch counts them, as plans require them, and as the machine executes them with padding."""

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
    """A context manager that counts FLOPs of matrix products (`get_total_flops`) and slows them down many times."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={attention: _attention_flops})


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of fused attention on CPUs, which PyTorch's counter lacks, by the shapes of its inputs [B, H, N, Dh]."""
    batch, heads, rows, head_dim = query
    return 2 * batch * heads * rows * key[2] * (head_dim + value[3])


class PairCount:
    """An attention that counts the pairs of a row and a key which `inner` computes.

    Attributes:
        pairs: pairs computed so far, in all layers. Rows that see different keys may be computed together under a mask,
            so these can be more pairs than plans require.
        flops: FLOPs of their products.
    """

    def __init__(self, inner: Attention) -> None:
        self.inner = inner
        self.pairs = self.flops = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        self.pairs += work.pair_count
        # A pair has two products, query by key and weight by value. The sink has the first only.
        self.flops += 2 * q.shape[1] * q.shape[2] * (2 * work.pair_count + len(q) * (sink is not None))
        return self.inner(q, k, v, work, sink)


class Executed:
    """Counts the FLOPs of an engine's passes from its construction on.

    Attributes:
        meter: the cost that plans require.
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
        """FLOPs that the machine executed in all passes, padding and repeated projections included."""
        cost = self.meter.total
        return cost.total.flops - cost.operations["attention"].flops + self.pairs.flops + cost.repeated
