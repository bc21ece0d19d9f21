"""What a machine's memory has room for beside a model's weights, and the widest form of numbers in which it fits.

It follows from the model's shape alone, before weights are read or downloaded. Nothing here imports PyTorch.
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
    page_size,
    product_bytes,
    token_bytes,
    weight_bytes,
    workspace_bytes,
)
from remask.engine.config import DEFAULT_STORE_TOKENS, EngineConfig
from remask.errors import ConfigError
from remask.model.config import ModelConfig
from remask.model.ranks import Shard
from remask.model.sizes import NumberFormat, check_sizes, kv_item

if TYPE_CHECKING:
    from remask.model.attention import Attention
    from remask.model.transformer import Transformer

CPU_SHARE = 0.9  # of the memory that is left: other programs need some too


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """What a CPU's memory has left beside a model's weights, and what needs room there, in bytes of all ranks."""

    config: ModelConfig
    dtype: NumberFormat  # of hidden states
    kv_item: int  # bytes of a number of K/V
    quantised: bool  # whether the matrices are quantized
    ranks: int  # processes that the model is spread over
    attention: Attention | None  # how it attends; None: by PyTorch
    left: int  # bytes that may be taken; negative where the weights alone are too large
    page: int  # tokens of a page. A canvas may take one more than its length says

    @classmethod
    def beside(cls, model: Transformer, free: int, page: int) -> CpuMemory:
        """Beside a `model` that is loaded, on a machine with `free` bytes of memory."""
        left = int(CPU_SHARE * free)
        ranks = model.ranks.shard.size
        return cls(
            model.config, model.dtype, model.kv_dtype.itemsize, model.quantised, ranks, model.attention, left, page
        )

    @classmethod
    def before(
        cls, config: ModelConfig, dtype: NumberFormat, quantization: Quantization | None, free: int, ranks: int = 1
    ) -> CpuMemory:
        """As it will be once such a model is loaded, on a machine with `free` bytes of memory now."""
        left = int(CPU_SHARE * (free - ranks * weight_bytes(config, dtype, ranks, quantization)))
        quantised = quantization is not None
        return cls(config, dtype, kv_item(dtype, quantised), quantised, ranks, None, left, page_size(None, config))

    @property
    def token(self) -> TokenBytes:
        """The memory of a token on all ranks."""
        one = token_bytes(self.config, self.dtype.itemsize, self.ranks, self.kv_item)
        return TokenBytes(self.ranks * one.kv, self.ranks * one.state)

    def workspace(self, rows: int, length: int) -> int:
        """What a pass over `rows` rows of canvases of `length` tokens takes."""
        one = workspace_bytes(self.config, rows, length, self.dtype.itemsize, self.ranks, self.attention)
        part = Shard(0, self.ranks).part(self.config)
        return self.ranks * (one + (product_bytes(part) if self.quantised else 0))

    def pair(self, length: int, store: int = 0) -> int:
        """What a guided request of `length` tokens takes, whose two canvases run together, and `store` stored ones."""
        long, token = length + self.page, self.token
        return 2 * long * token.kv + self.workspace(2 * long, long) + store * (token.kv + token.state)

    def longest(self, length: int, store: int) -> int:
        """The most tokens up to `length` of which a pair has room, beside as many of `store`: whole pages, or all."""

        def needed(tokens: int) -> int:
            return self.pair(tokens, min(tokens, store))

        if needed(length) <= self.left:
            return length
        counts = range(1, length // self.page + 1)
        return bisect_right(counts, self.left, key=lambda count: needed(count * self.page)) * self.page

    def fitting_length(self, asked: int | None = None) -> int:
        """Tokens of the longest canvas of an engine by default, or of up to `asked`; 0 where it would be refused."""
        if asked is not None:
            return self.longest(asked, 0)
        return self.longest(default_length(self.config), DEFAULT_STORE_TOKENS)

    def tokens(self) -> int | None:
        """Tokens of K/V that have room beside a pass over the longest default canvas; None: no canvas has."""
        long = self.fitting_length() + self.page
        return (self.left - self.workspace(2 * long, long)) // self.token.kv if long > self.page else None

    def rows(self, most: int, length: int, taken: int) -> int:
        """Rows of a pass that has room beside `taken` bytes: `most`, or fewer."""
        while most > 2 * length and self.workspace(most, length) > self.left - taken:
            most = max(2 * length, most // 2)
        return most

    def no_room(self, longest: int, fitting: int) -> ConfigError:
        """The error where two canvases of `longest` tokens do not fit, and those of `fitting` do; 0: none."""
        ways = [f"--max-model-len {fitting}"] if fitting else []
        ways += [] if self.quantised else ["--quantization int8"]
        return ConfigError(
            f"K/V do not fit: a request with guidance takes two canvases of up to {longest} tokens and a pass over "
            f"them, {gigabytes(self.pair(longest))}, and {gigabytes(max(0, self.left))} of memory are left beside the "
            f"weights. Use {' or '.join([*ways, 'a smaller model', 'a machine with more memory'])}"
        )


def cpu_quantizations(config: ModelConfig, ranks: int = 1) -> Iterator[Quantization]:
    """The quantizations for CPUs that take matrices of the sizes of `config`, the widest first."""
    for kind in CPU_QUANTIZATIONS:
        with suppress(ConfigError):
            check_sizes(kind, Shard(ranks - 1, ranks).part(config))
            yield kind


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model fits in one form of numbers."""

    quantization: Quantization | None  # what its matrices are quantized to; None: they are of the dtype
    length: int  # tokens of the longest canvas that has room
    wanted: int  # tokens of the longest canvas that an engine is to have

    @property
    def whole(self) -> bool:
        """Whether all has room that is wanted."""
        return self.length >= self.wanted


def widest(
    config: ModelConfig,
    dtype: NumberFormat,
    memory: DeviceMemory,
    limits: EngineConfig,
    ranks: int = 1,
    gpu_kinds: Iterable[Quantization] | None = None,
    attention: Attention | None = None,
) -> Fit:
    """The widest form in which an engine with these `limits` has room beside the weights.

    The forms are `dtype`, and quantized matrices: on a CPU those that take matrices of these sizes, on a CUDA device
    the `gpu_kinds`. Where no form has room for all that is wanted, it is the widest that has room for shorter or fewer
    canvases; the one for the longest where their length was asked for; and where none has room for any, the narrowest,
    with a length of 0. `memory` is that of a CPU's machine, or of each of `ranks` devices.
    """
    wanted = limits.max_model_len or default_length(config)
    kinds: list[Quantization | None] = [None, *(cpu_quantizations(config, ranks) if gpu_kinds is None else gpu_kinds)]
    fits = list[Fit]()
    for kind in kinds:
        if gpu_kinds is None:
            length = CpuMemory.before(config, dtype, kind, memory.room, ranks).fitting_length(limits.max_model_len)
        else:
            tokens = gpu_tokens(config, dtype, kind, memory, ranks, attention) or 0
            length = tokens // limits.max_num_seqs
        fits.append(Fit(kind, length, wanted))
        if fits[-1].whole:
            return fits[-1]
    some = [fit for fit in fits if fit.length]
    if limits.max_model_len is not None and some:
        return max(some, key=lambda fit: fit.length)
    return next(iter(some), fits[-1])


def gpu_tokens(
    config: ModelConfig,
    dtype: NumberFormat,
    quantization: Quantization | None,
    memory: DeviceMemory,
    ranks: int = 1,
    attention: Attention | None = None,
) -> int | None:
    """Tokens of K/V with room on each of `ranks` GPUs beside weights and the longest pass; None: not even that."""
    longest = default_length(config)
    room = memory.room - weight_bytes(config, dtype, ranks, quantization)
    room -= workspace_bytes(config, longest, longest, dtype.itemsize, ranks, attention)
    return room // token_bytes(config, dtype.itemsize, ranks).kv if room >= 0 else None
