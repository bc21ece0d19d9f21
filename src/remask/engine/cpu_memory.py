"""How a model's matrices are quantized: as configured, as in its files, or as `--quantization auto` measures."""

from collections.abc import Sequence
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
_MIN_SPEEDUP = 1.1  # by which a narrower format must be faster to be chosen


def resolve_quantization(
    choice: QuantizationChoice,
    stored: Quantization | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    memory: DeviceMemory | None,
    processes: int = 1,
    default: str | None = None,
) -> tuple[Quantization | None, str]:
    """The quantization of a model's matrices (None without one), and the reason for it in words.

    `choice` is the user's setting, `stored` the quantization of the model's files, and `default` what these advise for
    CPUs, which applies if there is no setting.

    On a CPU `auto` is the fastest of the dtype, int8 and int4 with which an engine fits (`CpuMemory`), by short
    measurements; a narrower one must be 1.1 times as fast, and if none fits, the narrowest is taken. Quantized files
    stay as they are. `memory`, which `processes` share, is None if it is not known.

    Raises `ConfigError` if `default` is no quantization, or if `choice` is "none" and the files are quantized.
    """
    if choice is None and stored is None and default is not None and device.type == "cpu":
        check_choice("'quantization' in remask.json", default, (AUTO, NONE, *CPU_QUANTIZATIONS))
        quantization, reason = resolve_quantization(default, None, config, dtype, device, memory, processes)  # type: ignore[arg-type]
        return quantization, reason if default == AUTO else "as the model's files advise"
    if choice == NONE:
        if stored is not None:
            raise ConfigError(f"quantization 'none': the model's files hold {stored}; load the model they were made of")
        return None, "as asked"
    if choice is not None and choice != AUTO:
        return choice, "as asked"
    if choice is None:
        return stored, "as in the files" if stored else "by default"
    if stored is not None:
        return stored, "auto: as in the files"
    if device.type != "cpu":
        return None, f"auto: device {device}"
    if config.parameters < BFLOAT16_PARAMETERS:
        return None, f"auto: {config.parameters / 1e6:.3g} million parameters gain nothing"

    def fits(quantization: Quantization | None) -> bool:
        if memory is None:
            return True
        return CpuMemory.before_loading(config, dtype, quantization, memory.room, processes).fitting_length() > 0

    candidates: list[Quantization | None] = [None, *cpu_quantizations(config, processes)]
    fitting = [candidate for candidate in candidates if fits(candidate)]
    if not fitting:
        return candidates[-1], "auto: nothing fits"
    if len(fitting) == 1:
        return fitting[0], "auto: no other fits"
    return _fastest(fitting, dtype)


def _fastest(fitting: Sequence[Quantization | None], dtype: torch.dtype) -> tuple[Quantization | None, str]:
    """The fastest of the formats `fitting`, and the reason in words. They are ordered from wide to narrow.

    A narrower format is chosen only if it is faster by the factor `_MIN_SPEEDUP`.
    """
    speed = {candidate: average(_speeds(candidate, dtype)) for candidate in fitting}
    fastest = fitting[0]
    for candidate in fitting[1:]:
        if speed[candidate] > _MIN_SPEEDUP * speed[fastest]:
            fastest = candidate
    names = {None: str(dtype).removeprefix("torch.")} | {name: name for name in CPU_QUANTIZATIONS}
    speeds = ", ".join(f"{names[candidate]} {speedup:.1f}" for candidate, speedup in speed.items())
    return fastest, f"auto: of what fits, times as fast as float32: {speeds}"


def _speeds(quantization: Quantization | None, dtype: torch.dtype) -> Speeds:
    if quantization is None:
        return dtype_speeds(dtype)
    return (int4_kernel() if quantization == "int4" else int8_kernel()).speed
