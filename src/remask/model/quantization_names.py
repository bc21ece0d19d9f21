"""The names of the number formats that weights can be quantized to."""

from typing import Literal, TypeAlias, get_args

Quantization: TypeAlias = Literal["int8", "int4", "fp8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
CPU_QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")
