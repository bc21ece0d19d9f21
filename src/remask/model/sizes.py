"""Sizes that decide how much memory a model of a shape takes. Nothing here imports PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from remask.checks import Quantization
from remask.errors import ConfigError
from remask.model.config import ModelConfig

GROUP = 32  # columns that have a step and an offset of their own in int4
GROUP_BYTES = GROUP // 2 + 4  # bytes of a group: its codes, and step and offset in float16
TILE = 2**18  # numbers of int4 that are unpacked at a time, or up to a half more
TILE_BYTES = (4 + 1) * TILE * 3 // 2  # at most, of such numbers in float32 and in eight bits
FP8_MULTIPLE = 16  # divides the numbers of rows and columns in a product of fp8
# Rows that are multiplied with a quantized matrix at a time, as a product needs several times their memory.
PRODUCT_ROWS = 1024
GPU_SCORES = 2**25  # scores of a tile of attention that keep a GPU busy


class NumberFormat(Protocol):
    """A number format: a `torch.dtype`, or a `Format` before PyTorch is imported."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""


@dataclass(frozen=True, slots=True)
class Format:
    """A number format by the name of its `torch.dtype`."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


# The formats that a model may compute in, by name.
FORMATS: Mapping[str, Format] = {
    name: Format(name, size) for name, size in (("float32", 4), ("bfloat16", 2), ("float16", 2))
}


def matrix_bytes(quantization: Quantization, shape: Sequence[int]) -> int:
    """Bytes of a quantized matrix [M, K], or [E, M, K], with a scale for each row; FBGEMM's rows have 8 bytes more."""
    *outer, columns = shape
    row_bytes = columns // GROUP * GROUP_BYTES if quantization == "int4" else columns
    return prod(outer) * (row_bytes + 4)


def kv_itemsize(dtype: NumberFormat, quantized: bool) -> int:
    """Bytes of a number of K and V on a CPU, for a model in `dtype` whose matrices are `quantized` or not."""
    return min(dtype.itemsize, 2) if quantized else dtype.itemsize


def check_matrix_sizes(quantization: Quantization, config: ModelConfig) -> None:
    """Raise `ConfigError` if the kernels for `quantization` do not support the model or the size of a matrix.

    The error lists the wrong sizes of all layers; layers count from 0.
    """
    if quantization == "fp8" and config.mixture is not None:
        raise ConfigError(
            "quantization='fp8' is for dense models: PyTorch has no grouped product of fp8 with a scale a row on all "
            "devices. Leave it out, or spread the model with tensor_parallel"
        )
    columns = {"int8": 1, "int4": GROUP, "fp8": FP8_MULTIPLE}[quantization]
    rows = FP8_MULTIPLE if quantization == "fp8" else 1
    faults = dict[tuple[str, int], list[int]]()  # layers by size and divisor
    for layer in range(config.layers):
        shape, mixture = config.shape_of(layer), config.mixture_of(layer)
        inner = {"hidden": shape.hidden, "heads x head_dim": shape.heads * shape.head_dim}
        outer = {"K/V heads x head_dim": shape.kv_heads * shape.head_dim} | inner
        widths = (config.intermediate,) if mixture is None else (mixture.shared, mixture.intermediate)
        layer_faults = [(f"{name}={size}", columns) for name, size in inner.items() if size % columns]
        layer_faults += [(f"{name}={size}", rows) for name, size in outer.items() if size % rows]
        layer_faults += [(f"a feed-forward {width} wide", columns) for width in widths if width % columns]
        for fault in dict.fromkeys(layer_faults):
            faults.setdefault(fault, []).append(layer)
    if faults:
        texts = []
        for (size_text, divisor), layers in faults.items():
            texts.append(f"{size_text}{_layers_in_words(layers, config)} is not a multiple of {divisor}")
        advice = "Use 'int8'" if quantization == "int4" else "Use the model without quantization"  # int8 is for CPUs
        raise ConfigError(f"quantization={quantization!r} does not take this model: {'; '.join(texts)}. {advice}")


def _layers_in_words(layers: Sequence[int], config: ModelConfig) -> str:
    """The first of `layers` and how many more there are, for an error; empty for all layers of the model."""
    if len(layers) == config.layers:
        return ""
    return f" in layer {layers[0]}" + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")
