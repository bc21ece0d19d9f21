"""K/V memory of running requests and of the prefix store: a pair of tensors per layer, divided into pages."""

import torch
from torch import Tensor

from remask.model.config import ModelConfig
from remask.model.sizes import kv_item


class Pool:
    """K and V of every layer, [pages * page_size + 1, kv_heads, head_dim] each; layers may differ in the latter two.

    A slot is a row of these tensors. K is stored after RoPE, as a token's position never changes. The allocator, not
    the pool, knows which request owns which page.

    Attributes:
        spare: the last slot, which no page has. What is of no use may be written there; nobody reads it.
        signals: the expected embedding of what was last predicted of each slot's position, [slots, D], addressed like
            K and V of the first layer; zero in the last slot. None where the model takes none in.
    """

    signals: Tensor | None = None

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        outputs: torch.dtype | None = None,
    ) -> None:
        """K and V are of `dtype`, and outputs that are kept too, unless these are of another."""
        self.pages, self.page_size = pages, page_size
        self.spare = pages * page_size
        layers = map(config.shape_of, range(config.layers))
        shapes = [(self.spare + 1, layer.kv_heads, layer.head_dim) for layer in layers]
        self.k, self.v = (tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes) for _ in range(2))
        if config.self_conditioning:
            self.signals = torch.zeros((self.spare + 1, config.hidden), dtype=outputs or dtype, device=device)
        self._outputs = (self.spare + 1, config.hidden), outputs or dtype
        self.outputs: tuple[tuple[Tensor, Tensor], ...] = ()
        self._picked: Tensor | None = None

    def keep_outputs(self) -> None:
        """Allocate attention and FFN outputs, [slots, D] each per layer, addressed like K and V, once."""
        if not self.outputs:
            (shape, dtype), like = self._outputs, self.k[0]
            self.outputs = tuple(
                (like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=dtype)) for _ in self.k
            )

    @property
    def picked(self) -> Tensor:
        """Whether a slot's row was chosen by the last choice among rows that it took part in, bool [slots]."""
        if self._picked is None:
            self._picked = self.k[0].new_zeros(self.spare + 1, dtype=torch.bool)
        return self._picked

    @property
    def nbytes(self) -> int:
        """Bytes reserved for all layers."""
        signals = () if self.signals is None else (self.signals,)
        return sum(t.nbytes for t in (*self.k, *self.v, *signals, *(t for pair in self.outputs for t in pair)))

    def bytes_of(self, slots: int) -> int:
        """Bytes of `slots` slots of one layer: all memory, shared evenly among the layers, which may differ."""
        return slots * (self.nbytes // (self.spare + 1)) // len(self.k)


def cpu_kv_dtype(dtype: torch.dtype, quantised: bool) -> torch.dtype:
    """The dtype of K/V on a CPU of a model of `dtype`, whose matrices are quantized or not."""
    return dtype if kv_item(dtype, quantised) == dtype.itemsize else torch.bfloat16
