"""What decides how much memory a model takes, as far as its shape says it: nothing here imports PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from remask.checks import Quantization
from remask.errors import ConfigError
from remask.model.config import ModelConfig

GROUP = 32  # columns that have a step and an offset of their own, of int4
GROUP_BYTES = GROUP // 2 + 4  # bytes of a group: its codes, and step and offset in float16
TILE = 2**18  # numbers of int4 that are unpacked at a time, or up to a half more
TILE_BYTES = 5 * TILE * 3 // 2  # in float32, and in eight bits
FP8_MULTIPLE = 16  # rows and columns of a product of fp8
MULTIPLIED = 1024  # rows that are multiplied at a time, as what a product makes of each is several times the row
GPU_SCORES = 2**25  # of a tile of attention on a GPU, which keep it busy


class NumberFormat(Protocol):
    """A format of numbers: a `torch.dtype`, or what is known of one before PyTorch is imported."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of numbers by the name of its `torch.dtype`."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


# The formats that a model may compute in, by name.
FORMATS: Mapping[str, Format] = {
    name: Format(name, size) for name, size in (("float32", 4), ("bfloat16", 2), ("float16", 2))
}


def matrix_bytes(kind: Quantization, shape: Sequence[int]) -> int:
    """Bytes of a quantized matrix [M, K], or [E, M, K]: each row has a scale. FBGEMM's rows have two numbers more."""
    *outer, columns = shape
    return prod(outer) * ((columns // GROUP * GROUP_BYTES if kind == "int4" else columns) + 4)


def kv_item(dtype: NumberFormat, quantised: bool) -> int:
    """Bytes of a number of K and V on a CPU, of a model of `dtype` whose matrices are quantized or not."""
    return min(dtype.itemsize, 2) if quantised else dtype.itemsize


def check_sizes(kind: Quantization, config: ModelConfig) -> None:
    """Raise `ConfigError` where `kind` is not for such models, or a matrix has a size that its kernel does not take.

    Every layer is looked at. A size that some layers have is named with the first of these, counted from 0.
    """
    if kind == "fp8" and config.mixture is not None:
        raise ConfigError(
            "quantization='fp8' is for dense models: PyTorch has no grouped product of fp8 with a scale a row on all "
            "devices. Leave it out, or spread the model with tensor_parallel"
        )
    columns = {"int8": 1, "int4": GROUP, "fp8": FP8_MULTIPLE}[kind]
    rows = FP8_MULTIPLE if kind == "fp8" else 1
    faults = dict[tuple[str, int], list[int]]()  # what is no multiple of what, by layer
    for layer in range(config.layers):
        shape, mixture = config.shape_of(layer), config.mixture_of(layer)
        inner = {"hidden": shape.hidden, "heads x head_dim": shape.heads * shape.head_dim}
        outer = {"K/V heads x head_dim": shape.kv_heads * shape.head_dim} | inner
        widths = (config.intermediate,) if mixture is None else (mixture.shared, mixture.intermediate)
        odd = [(f"{name}={size}", columns) for name, size in inner.items() if size % columns]
        odd += [(f"{name}={size}", rows) for name, size in outer.items() if size % rows]
        odd += [(f"a feed-forward {width} wide", columns) for width in widths if width % columns]
        for fault in dict.fromkeys(odd):
            faults.setdefault(fault, []).append(layer)
    if faults:
        texts = [f"{name}{_among(layers, config)} is no multiple of {by}" for (name, by), layers in faults.items()]
        way = "Use 'int8'" if kind == "int4" else "Use the model without quantization"  # int8 is for CPUs
        raise ConfigError(f"quantization={kind!r} does not take this model: {'; '.join(texts)}. {way}")


def _among(layers: Sequence[int], config: ModelConfig) -> str:
    """Which layers something is said of, in words; empty: of all."""
    if len(layers) == config.layers:
        return ""
    return f" in layer {layers[0]}" + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")
