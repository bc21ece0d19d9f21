"""What a CPU's memory has room for beside a model's weights. `--quantization auto` takes the fastest that fits.

All of it follows from the model's shape, so it is known before weights are read or downloaded.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from remask.checks import CPU_QUANTIZATIONS, Quantization, QuantizationChoice
from remask.checks.values import one_of
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
from remask.engine.config import AUTO, DEFAULT_STORE_TOKENS
from remask.errors import ConfigError
from remask.machine.device import BFLOAT16_PARAMETERS
from remask.model.attention import Attention
from remask.model.config import ModelConfig
from remask.model.cpu_kernels import Speeds, average, dtype_speeds, int4_kernel, int8_kernel
from remask.model.pool import cpu_kv_dtype
from remask.model.quantised import check_sizes
from remask.model.ranks import Shard
from remask.model.transformer import Transformer

CPU_SHARE = 0.9  # of the memory that is left: other programs need some too
NONE: Final = "none"
_GAIN = 1.1  # by how much narrower numbers must be faster to be taken


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """What is left on a CPU beside a model's weights, and what is to have room there, in bytes of all ranks together.

    Attributes:
        config: the model's shape.
        dtype, kv_dtype: of hidden states, and of K/V.
        quantised: whether the matrices are quantized.
        ranks: processes that the model is spread over.
        attention: how it attends; None: by PyTorch.
        left: bytes that may be taken; negative where the weights alone are too large.
        page: tokens of a page. A canvas may take one more than its length says.
    """

    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantised: bool
    ranks: int
    attention: Attention | None
    left: int
    page: int

    @classmethod
    def beside(cls, model: Transformer, free: int, page: int) -> "CpuMemory":
        """Beside a `model` that is loaded, on a machine with `free` bytes of memory."""
        left = int(CPU_SHARE * free)
        ranks = model.ranks.shard.size
        return cls(model.config, model.dtype, model.kv_dtype, model.quantised, ranks, model.attention, left, page)

    @classmethod
    def before(
        cls, config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None, free: int, ranks: int = 1
    ) -> "CpuMemory":
        """As it will be once such a model is loaded, on a machine with `free` bytes of memory now."""
        left = int(CPU_SHARE * (free - ranks * weight_bytes(config, dtype, ranks, quantization)))
        quantised = quantization is not None
        kv_dtype, page = cpu_kv_dtype(dtype, quantised), page_size(None, config)
        return cls(config, dtype, kv_dtype, quantised, ranks, None, left, page)

    @property
    def token(self) -> TokenBytes:
        """The memory of a token on all ranks."""
        one = token_bytes(self.config, self.dtype.itemsize, self.ranks, self.kv_dtype.itemsize)
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

    def fitting_length(self) -> int:
        """Tokens of the longest canvas of an engine that is made by default; 0 where it would be refused."""
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


def resolve_quantization(
    asked: QuantizationChoice,
    stored: Quantization | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    memory: DeviceMemory | None,
    processes: int = 1,
    usual: str | None = None,
) -> tuple[Quantization | None, str]:
    """How a model's matrices are kept, and the reason for it in words.

    On a CPU `auto` is the fastest of the dtype, int8 and int4 beside which an engine has room (`CpuMemory`), by short
    measurements; the wider one where they are as fast. Where none fits it is the narrowest. Files that are quantised
    stay as they are. `memory` is None where it is not known, and `processes` share it. `usual` is what the model's
    files name for CPUs, and holds where nothing is asked. Raises `ConfigError` where it is none of these, or where
    `none` is asked of files that are quantized.
    """
    if asked is None and stored is None and usual is not None and device.type == "cpu":
        one_of("'quantization' in remask.json", usual, (AUTO, NONE, *CPU_QUANTIZATIONS))
        kind, why = resolve_quantization(usual, None, config, dtype, device, memory, processes)  # type: ignore[arg-type]
        return kind, why if usual == AUTO else "as the model's files advise"
    if asked == NONE:
        if stored is not None:
            raise ConfigError(f"quantization 'none': the model's files hold {stored}; load the model they were made of")
        return None, "as asked"
    if asked != AUTO:
        return asked or stored, "as asked" if asked else "as in the files" if stored else "by default"
    if stored is not None:
        return stored, "auto: as in the files"
    if device.type != "cpu":
        return None, f"auto: device {device}"
    if config.parameters < BFLOAT16_PARAMETERS:
        return None, f"auto: {config.parameters / 1e6:.3g} million parameters gain nothing"

    def fits(kind: Quantization | None) -> bool:
        return memory is None or CpuMemory.before(config, dtype, kind, memory.room, processes).fitting_length() > 0

    kinds: list[Quantization | None] = [None, *cpu_quantizations(config, processes)]
    fitting = [kind for kind in kinds if fits(kind)]
    if len(fitting) < 2:
        return (fitting or kinds)[-1], "auto: no other fits" if fitting else "auto: nothing fits"
    speed = {kind: average(_speeds(kind, dtype)) for kind in fitting}
    taken = fitting[0]
    for kind in fitting[1:]:
        taken = kind if speed[kind] > _GAIN * speed[taken] else taken
    names = {None: str(dtype).removeprefix("torch.")} | {kind: kind for kind in CPU_QUANTIZATIONS}
    found = ", ".join(f"{names[kind]} {own:.1f}" for kind, own in speed.items())
    return taken, f"auto: of what fits, times as fast as float32: {found}"


def _speeds(kind: Quantization | None, dtype: torch.dtype) -> Speeds:
    if kind is None:
        return dtype_speeds(dtype)
    return (int4_kernel() if kind == "int4" else int8_kernel()).speed
