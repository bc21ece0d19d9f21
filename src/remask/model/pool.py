"""K/V memory of running requests and of the prefix store: a pair of tensors per layer, divided into pages."""

import torch
from torch import Tensor

from remask.model.config import ModelConfig
from remask.model.sizes import kv_itemsize


class Pool:
    """K and V of every layer, [page_count * page_size + 1, kv_heads, head_dim] each. Layers may differ in heads.

    A slot is a row of these tensors. K is stored after RoPE, as a token's position never changes. The allocator, not
    the pool, knows which request owns which page.

    Attributes:
        spare: the last slot, which is in no page. Rows without a slot write there, and nobody reads it.
        signals: the expected embedding of the last predictions of each slot's position, [slots, D], addressed like K
            and V of the first layer; zero in the last slot. None: the model has no self-conditioning.
        outputs: attention and FFN outputs of each layer, [slots, D] each; empty before `allocate_outputs`.
    """

    signals: Tensor | None = None

    def __init__(
        self,
        config: ModelConfig,
        page_count: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        outputs: torch.dtype | None = None,
    ) -> None:
        """K and V have the dtype `dtype`, and cached outputs the dtype `outputs`; None: the same one."""
        self.page_count = page_count
        self.page_size = page_size
        self.spare = page_count * page_size
        layers = map(config.shape_of, range(config.layers))
        shapes = [(self.spare + 1, layer.kv_heads, layer.head_dim) for layer in layers]
        self.k, self.v = (tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes) for _ in range(2))
        if config.self_conditioning:
            self.signals = torch.zeros((self.spare + 1, config.hidden), dtype=outputs or dtype, device=device)
        self._output_shape = self.spare + 1, config.hidden
        self._output_dtype = outputs or dtype
        self.outputs: tuple[tuple[Tensor, Tensor], ...] = ()
        self._picked: Tensor | None = None

    def allocate_outputs(self) -> None:
        """Allocate `outputs`, which are addressed like K and V, if that was not done before."""
        if not self.outputs:
            shape, dtype = self._output_shape, self._output_dtype
            self.outputs = tuple((k.new_empty(shape, dtype=dtype), k.new_empty(shape, dtype=dtype)) for k in self.k)

    @property
    def picked(self) -> Tensor:
        """For each slot, whether the last `Pick` with this slot among its rows picked it, bool [slots]."""
        if self._picked is None:
            self._picked = self.k[0].new_zeros(self.spare + 1, dtype=torch.bool)
        return self._picked

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are allocated so far."""
        tensors = [*self.k, *self.v, *(output for pair in self.outputs for output in pair)]
        tensors += [tensor for tensor in (self.signals, self._picked) if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)

    def bytes_of(self, slots: int) -> int:
        """Bytes of `slots` slots of one layer, averaged over the layers and rounded down."""
        return slots * (self.nbytes // (self.spare + 1)) // len(self.k)


def cpu_kv_dtype(dtype: torch.dtype, quantized: bool) -> torch.dtype:
    """The dtype of K/V on a CPU, of a model of `dtype` whose matrices are `quantized` or not."""
    return dtype if kv_itemsize(dtype, quantized) == dtype.itemsize else torch.bfloat16
