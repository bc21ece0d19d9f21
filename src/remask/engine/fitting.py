"""Which canvases fit into a machine's memory beside a model's weights, and the widest number format for which some do.

It is computed from the model's shape, before weights are read or downloaded. Nothing here imports PyTorch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remask.checks import CPU_QUANTIZATIONS, Quantization
from remask.engine.capacity import (
    DeviceMemory,
    TokenBytes,
    default_length,
    gigabytes,
    product_bytes,
    resolve_page_size,
    token_bytes,
    weight_bytes,
    workspace_bytes,
)
from remask.engine.config import DEFAULT_STORE_TOKENS, EngineConfig
from remask.errors import ConfigError
from remask.model.config import ModelConfig
from remask.model.ranks import Shard
from remask.model.sizes import NumberFormat, check_matrix_sizes, kv_itemsize

if TYPE_CHECKING:
    from remask.model.attention import Attention
    from remask.model.transformer import Transformer

CPU_SHARE = 0.9  # of the free memory, as other programs need some too


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMemory:
    """The memory of a CPU beside a model's weights, and what an engine needs of it, in bytes of all ranks."""

    config: ModelConfig
    dtype: NumberFormat  # of hidden states
    kv_itemsize: int  # bytes of a number of K/V
    quantized: bool  # whether the matrices are quantized
    ranks: int  # processes that the model is distributed over
    attention: Attention | None  # computes attention; None for PyTorch
    available: int  # bytes that may be allocated; negative if the weights alone are too large
    page_size: int  # tokens of a page, by which a canvas may be larger than its length

    @classmethod
    def beside_model(cls, model: Transformer, free: int, page_size: int) -> CpuMemory:
        """For a `model` that is loaded, on a machine with `free` bytes of memory."""
        return cls(
            config=model.config,
            dtype=model.dtype,
            kv_itemsize=model.kv_dtype.itemsize,
            quantized=model.quantized,
            ranks=model.ranks.shard.size,
            attention=model.attention,
            available=int(CPU_SHARE * free),
            page_size=page_size,
        )

    @classmethod
    def before_loading(
        cls, config: ModelConfig, dtype: NumberFormat, quantization: Quantization | None, free: int, ranks: int = 1
    ) -> CpuMemory:
        """For a model that will be loaded, on a machine with `free` bytes of memory before that."""
        return cls(
            config=config,
            dtype=dtype,
            kv_itemsize=kv_itemsize(dtype, quantization is not None),
            quantized=quantization is not None,
            ranks=ranks,
            attention=None,
            available=int(CPU_SHARE * (free - ranks * weight_bytes(config, dtype, ranks, quantization))),
            page_size=resolve_page_size(None, config),
        )

    @property
    def token(self) -> TokenBytes:
        """The memory of a token on all ranks."""
        rank_bytes = token_bytes(self.config, self.dtype.itemsize, self.ranks, self.kv_itemsize)
        return TokenBytes(self.ranks * rank_bytes.kv, self.ranks * rank_bytes.state)

    def workspace(self, row_count: int, length: int) -> int:
        """Bytes that a pass over `row_count` rows of canvases of `length` tokens takes."""
        rank_bytes = workspace_bytes(self.config, row_count, length, self.dtype.itemsize, self.ranks, self.attention)
        if self.quantized:
            rank_bytes += product_bytes(Shard(0, self.ranks).part(self.config))
        return self.ranks * rank_bytes

    def pair_bytes(self, length: int, stored: int = 0) -> int:
        """Bytes of a guided request, whose two canvases of `length` tokens run together, and of `stored` tokens."""
        slots = length + self.page_size
        token = self.token
        return 2 * slots * token.kv + self.workspace(2 * slots, slots) + stored * (token.kv + token.state)

    def max_canvas(self, length: int, max_stored: int) -> int:
        """Tokens of the longest canvases of which a guided pair fits: `length`, or else a multiple of the page size.

        Beside them the store holds as many tokens as one canvas, at most `max_stored`. Returns 0 if no page fits.
        """

        def required_bytes(canvas_length: int) -> int:
            return self.pair_bytes(canvas_length, min(canvas_length, max_stored))

        if required_bytes(length) <= self.available:
            return length
        counts = range(1, length // self.page_size + 1)
        page_count = bisect_right(counts, self.available, key=lambda count: required_bytes(count * self.page_size))
        return page_count * self.page_size

    def fitting_length(self, max_model_len: int | None = None) -> int:
        """Tokens of the longest canvas of an engine with this setting; 0 if the engine would be refused."""
        if max_model_len is not None:
            return self.max_canvas(max_model_len, 0)
        return self.max_canvas(default_length(self.config), DEFAULT_STORE_TOKENS)

    def kv_tokens(self) -> int | None:
        """Tokens of K/V that fit beside a pass over the longest default canvas; None if no canvas fits."""
        length = self.fitting_length()
        if not length:
            return None
        slots = length + self.page_size
        return (self.available - self.workspace(2 * slots, slots)) // self.token.kv

    def shortage_error(self, max_canvas: int, fitting: int) -> ConfigError:
        """The error that two canvases of `max_canvas` tokens do not fit. It advises `fitting` tokens, unless 0."""
        ways = [f"--max-model-len {fitting}"] if fitting else []
        ways += [] if self.quantized else ["--quantization int8"]
        return ConfigError(
            f"K/V do not fit: a request with guidance takes two canvases of up to {max_canvas} tokens and a pass over "
            f"them, {gigabytes(self.pair_bytes(max_canvas))}, and {gigabytes(max(0, self.available))} of memory are "
            f"left beside the weights. Use {' or '.join([*ways, 'a smaller model', 'a machine with more memory'])}"
        )


def cpu_quantizations(config: ModelConfig, ranks: int = 1) -> Iterator[Quantization]:
    """Yield the quantizations for CPUs that support the matrix sizes of `config`, the widest first."""
    for quantization in CPU_QUANTIZATIONS:
        with suppress(ConfigError):
            check_matrix_sizes(quantization, Shard(ranks - 1, ranks).part(config))
            yield quantization


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model fits with one quantization, or without."""

    quantization: Quantization | None  # of its matrices; None if they have the dtype
    length: int  # tokens of the longest canvas that fits
    required: int  # tokens of the longest canvas that an engine is to have

    @property
    def is_full(self) -> bool:
        """Whether the longest canvas fits that an engine is to have."""
        return self.length >= self.required


def widest_fit(
    config: ModelConfig,
    dtype: NumberFormat,
    memory: DeviceMemory,
    limits: EngineConfig,
    ranks: int = 1,
    gpu_quantizations: Iterable[Quantization] | None = None,
    attention: Attention | None = None,
) -> Fit:
    """The widest number format with which an engine with these `limits` fits beside the weights.

    The formats are `dtype` and narrower ones: on a CPU the quantizations that support these matrix sizes, on a CUDA
    device the `gpu_quantizations`. If no format has room for the required length, the result is the widest with room
    for a shorter canvas, or, if `limits` name the length, the one with room for the longest canvas. If no format has
    room for any canvas, it is the narrowest, with a length of 0. `memory` is that of a CPU's machine, or of each of
    `ranks` devices.
    """
    required = limits.max_model_len or default_length(config)
    narrower = cpu_quantizations(config, ranks) if gpu_quantizations is None else gpu_quantizations
    fits = list[Fit]()
    for quantization in (None, *narrower):
        if gpu_quantizations is None:
            cpu = CpuMemory.before_loading(config, dtype, quantization, memory.room, ranks)
            length = cpu.fitting_length(limits.max_model_len)
        else:
            tokens = gpu_tokens(config, dtype, quantization, memory, ranks, attention) or 0
            length = tokens // limits.max_num_seqs
        fits.append(Fit(quantization, length, required))
        if fits[-1].is_full:
            return fits[-1]
    partial_fits = [fit for fit in fits if fit.length]
    if not partial_fits:
        return fits[-1]
    if limits.max_model_len is not None:
        return max(partial_fits, key=lambda fit: fit.length)
    return partial_fits[0]


def gpu_tokens(
    config: ModelConfig,
    dtype: NumberFormat,
    quantization: Quantization | None,
    memory: DeviceMemory,
    ranks: int = 1,
    attention: Attention | None = None,
) -> int | None:
    """Tokens of K/V that fit on each of `ranks` GPUs beside weights and the longest pass; None if these do not fit."""
    max_canvas = default_length(config)
    room = memory.room - weight_bytes(config, dtype, ranks, quantization)
    room -= workspace_bytes(config, max_canvas, max_canvas, dtype.itemsize, ranks, attention)
    return room // token_bytes(config, dtype.itemsize, ranks).kv if room >= 0 else None
