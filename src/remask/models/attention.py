"""Attention over K/V slots. A work list says which slots a row sees; there is no mask of the whole batch."""

from typing import Protocol, TypeAlias

from torch import Tensor

from remask.models.work_list import WorkList

Sink: TypeAlias = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Attention of rows to the slots that `work` names. It neither changes nor keeps its inputs."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        """Returns [N, heads * Dh] from `q` [N, heads, Dh] and one layer's `k` and `v` [slots, kv_heads, Dh].

        `sink` is a key and a value, [kv_heads, Dh] each. Every row attends to it and to its slots.
        """
        ...
