"""Which number format `--quantization auto` takes: the fastest that fits."""

from contextlib import suppress
from typing import Literal, TypeAlias

import torch

from remask.engine.capacity import DeviceMemory, weight_bytes
from remask.engine.config import AUTO
from remask.errors import ConfigError
from remask.machine.device import BFLOAT16_PARAMETERS
from remask.model.config import ModelConfig
from remask.model.int4_kernels import int4_kernel
from remask.model.int8_kernels import int8_kernel
from remask.model.kernel_speed import Speeds, average, dtype_speeds
from remask.model.quantised import check_sizes
from remask.model.quantization_names import CPU_QUANTIZATIONS, Quantization
from remask.model.ranks import Shard

Asked: TypeAlias = Quantization | Literal["auto"] | None
_GAIN = 1.1  # by how much narrower numbers must be faster to be taken


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

    On a CPU `auto` is the fastest of the dtype, int8 and int4 that fit, by short measurements; the wider one where they
    are as fast. Where none fits it is the narrowest. Files that are quantised stay as they are. `memory` is None where
    it is not known, and `processes` share it.
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

    kinds: list[Quantization | None] = [None, "int8"]
    with suppress(ConfigError):
        check_sizes("int4", Shard(processes - 1, processes).part(config))
        kinds.append("int4")
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
