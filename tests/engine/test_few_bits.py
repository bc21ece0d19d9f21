"""`--quantization auto`: the fastest that fits, whatever a processor makes of int8."""

import logging
from typing import Any

import pytest
import torch

from remask import LLM
from remask.checkpoint.presets import preset
from remask.engine import few_bits
from remask.engine.capacity import DeviceMemory
from remask.engine.few_bits import resolve_quantization
from remask.model.int8_kernels import Kernel

CPU, LLADA = torch.device("cpu"), preset("llada-8b")
GB = 10**9


def chosen(monkeypatch: pytest.MonkeyPatch, speed: tuple[float, ...], free: float | None, **changed: Any) -> str | None:
    monkeypatch.setattr(few_bits, "int8_kernel", lambda: Kernel("fbgemm", speed=speed))
    memory = None if free is None else DeviceMemory(64 * GB, int(free * GB), 1.0)
    told = {"asked": "auto", "stored": None, "config": LLADA, "dtype": torch.bfloat16, "device": CPU} | changed
    kind, why = resolve_quantization(**told, memory=memory)
    assert why.startswith("auto: ")
    return kind


FAST, SLOW = (1.1, 3.0, 2.0), (2.0, 3.0, 0.9)


@pytest.mark.parametrize(
    ("speed", "free", "kind"),
    [
        (FAST, None, "int8"),
        (FAST, 40, "int8"),
        (FAST, 10, "int8"),
        (FAST, 8, "int4"),
        (FAST, 2, "int4"),
        (SLOW, None, None),
        (SLOW, 40, None),
        (SLOW, 10, "int8"),
        (SLOW, 7, "int4"),
    ],
)
def test_the_fastest_that_fits(
    monkeypatch: pytest.MonkeyPatch, speed: tuple[float, ...], free: float | None, kind: str | None
) -> None:
    """int8 counts as fast where it is with any number of rows."""
    assert chosen(monkeypatch, speed, free) == kind


def test_what_there_is_nothing_to_choose_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, FAST, 40, config=preset("llada-tiny")) is None
    assert chosen(monkeypatch, FAST, 40, device=torch.device("cuda")) is None
    assert chosen(monkeypatch, SLOW, 40, stored="int4") == "int4"
    assert resolve_quantization("int4", None, LLADA, torch.bfloat16, CPU, None) == ("int4", "as asked")
    assert resolve_quantization(None, "int8", LLADA, torch.bfloat16, CPU, None) == ("int8", "as in the files")
    assert resolve_quantization(None, None, LLADA, torch.bfloat16, CPU, None)[0] is None


def test_the_choice_is_in_the_start_up_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(few_bits, "BFLOAT16_PARAMETERS", 0)
    monkeypatch.setattr(few_bits, "int8_kernel", lambda: Kernel("int_mm", speed=FAST))
    with caplog.at_level(logging.INFO):
        llm = LLM("llada-tiny", load_format="dummy", dtype="float32", device="cpu", threads=1, quantization="auto")
    assert llm.loaded.quantization == "int8"
    assert "(auto: 1.1 times as fast as float32 at least)" in caplog.text
    assert f"({llm.engine.pool.pages * 16} tokens of K/V in bfloat16)" in caplog.text
