"""How a model's matrices are kept: as asked, as in its files, or as `--quantization auto` measures."""

from typing import Final

import torch

from remask.checks import CPU_QUANTIZATIONS, Quantization, QuantizationChoice
from remask.checks.values import check_choice
from remask.engine.capacity import DeviceMemory
from remask.engine.config import AUTO
from remask.engine.fitting import CpuMemory, cpu_quantizations
from remask.errors import ConfigError
from remask.machine.cpu import BFLOAT16_PARAMETERS
from remask.model.config import ModelConfig
from remask.model.cpu_kernels import Speeds, average, dtype_speeds, int4_kernel, int8_kernel

NONE: Final = "none"
_GAIN = 1.1  # by how much narrower numbers must be faster to be taken


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
    measurements: the wider one where they are as fast, and the narrowest where none fits. Quantised files stay as they
    are. `memory`, which `processes` share, is None where it is not known. `usual` is what the model's files name for
    CPUs, and holds where nothing is asked. Raises `ConfigError` where it is none of these, or where `none` is asked of
    files that are quantized.
    """
    if asked is None and stored is None and usual is not None and device.type == "cpu":
        check_choice("'quantization' in remask.json", usual, (AUTO, NONE, *CPU_QUANTIZATIONS))
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
    fastest = fitting[0]
    for kind in fitting[1:]:
        fastest = kind if speed[kind] > _GAIN * speed[fastest] else fastest
    names = {None: str(dtype).removeprefix("torch.")} | {kind: kind for kind in CPU_QUANTIZATIONS}
    speeds = ", ".join(f"{names[kind]} {times:.1f}" for kind, times in speed.items())
    return fastest, f"auto: of what fits, times as fast as float32: {speeds}"


def _speeds(kind: Quantization | None, dtype: torch.dtype) -> Speeds:
    if kind is None:
        return dtype_speeds(dtype)
    return (int4_kernel() if kind == "int4" else int8_kernel()).speed
