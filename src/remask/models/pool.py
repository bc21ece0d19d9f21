"""K/V memory of running requests and of the prefix store: one tensor pair a layer, cut into pages."""

import torch

from remask.models.config import ModelConfig


class Pool:
    """K and V of every layer, [pages * page_size, kv_heads, head_dim] each; K after RoPE, as positions never move.

    A slot is a row of these tensors. Who owns which page is the allocator's business, not the pool's.
    """

    def __init__(
        self, config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages, self.page_size = pages, page_size
        shape = (pages * page_size, config.kv_heads, config.head_dim)
        self.k = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layers))
        self.v = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layers))

    @property
    def nbytes(self) -> int:
        """Bytes reserved for all layers."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.k[0][0].nbytes
