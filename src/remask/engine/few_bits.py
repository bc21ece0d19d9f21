"""Which number format `--quantization auto` takes: the fastest that fits."""

from typing import Literal, TypeAlias

import torch

from remask.engine.capacity import DeviceMemory, weight_bytes
from remask.engine.config import AUTO
from remask.errors import ConfigError
from remask.machine.device import BFLOAT16_PARAMETERS
from remask.model.config import ModelConfig
from remask.model.int8_kernels import int8_kernel
from remask.model.quantised import check_sizes
from remask.model.quantization_names import Quantization

Asked: TypeAlias = Quantization | Literal["auto"] | None


def resolve_quantization(
    asked: Asked,
    stored: Quantization | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    memory: DeviceMemory | None,
    processes: int = 1,
) -> tuple[Quantization | None, str]:
    """How a model's matrices are kept, and the reason for it in words.

    On a CPU `auto` is int8 where its kernel was measured to be as fast as float32 at least with any number of rows.
    Where nothing that is as fast fits, it is what fits: the dtype, int8, int4. Files that are quantised stay as they
    are. `memory` is None where it is not known, and `processes` share it.
    """
    if asked != AUTO:
        return asked or stored, "as asked" if asked else "as in the files" if stored else "by default"
    if stored is not None:
        return stored, "auto: as in the files"
    if device.type != "cpu":
        return None, f"auto: device {device}"
    if config.parameters < BFLOAT16_PARAMETERS:
        return None, f"auto: {config.parameters / 1e6:.3g} million parameters gain nothing"

    def fits(kind: Quantization | None) -> bool:
        return memory is None or weight_bytes(config, dtype, processes, kind) * processes <= memory.room

    slowest = min(int8_kernel().speed)
    if slowest >= 1 and fits("int8"):
        return "int8", f"auto: {slowest:.1f} times as fast as float32 at least"
    if fits(None):
        return None, "auto: int8 is slower here" if slowest < 1 else "auto: int8 does not fit"
    if fits("int8"):
        return "int8", "auto: no wider one fits"
    try:
        check_sizes("int4", config)
    except ConfigError:
        return "int8", "auto: nothing fits, and int4 does not take this model"
    return "int4", "auto: no wider one fits"
