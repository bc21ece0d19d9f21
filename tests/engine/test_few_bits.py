"""`--quantization auto`: the fastest that fits, whatever a processor makes of the dtype, int8 and int4."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from remask import LLM
from remask.engine import capacity
from remask.engine.capacity import DeviceMemory, resolve_quantization
from remask.families import preset
from remask.model.cpu_kernels import Kernel

CPU, LLADA = torch.device("cpu"), preset("llada-8b")
GB = 10**9


def chosen(
    monkeypatch: pytest.MonkeyPatch, speed: tuple[float, float, float], free: float | None, **changed: Any
) -> str | None:
    """What is taken where the dtype, int8 and int4 are so many times as fast as float32."""
    dtype, eight, four = ((own / 2, own, 2 * own) for own in speed)
    monkeypatch.setattr(capacity, "dtype_speeds", lambda _: dtype)
    monkeypatch.setattr(capacity, "int8_kernel", lambda: Kernel("fbgemm", speed=eight))
    monkeypatch.setattr(capacity, "int4_kernel", lambda: Kernel("int_mm", speed=four))
    memory = None if free is None else DeviceMemory(64 * GB, int(free * GB), 1.0)
    told = {"asked": "auto", "stored": None, "config": LLADA, "dtype": torch.bfloat16, "device": CPU} | changed
    kind, why = resolve_quantization(**told, memory=memory)
    assert why.startswith("auto: ")
    return kind


EIGHT, WIDE, FOUR = (2.0, 3.0, 2.5), (4.0, 3.0, 2.5), (1.0, 3.0, 3.5)


@pytest.mark.parametrize(
    ("speed", "free", "kind"),
    [
        (EIGHT, None, "int8"),
        (EIGHT, 40, "int8"),
        (EIGHT, 10, "int8"),
        (EIGHT, 8, "int4"),
        (EIGHT, 2, "int4"),
        (WIDE, None, None),
        (WIDE, 40, None),
        (WIDE, 10, "int8"),
        (WIDE, 7, "int4"),
        (FOUR, None, "int4"),
        ((3.0, 3.2, 3.2), None, None),
        ((1.0, 3.0, 3.2), None, "int8"),
    ],
)
def test_the_fastest_that_fits(
    monkeypatch: pytest.MonkeyPatch, speed: tuple[float, float, float], free: float | None, kind: str | None
) -> None:
    """Bits are given up for a tenth of speed at least."""
    assert chosen(monkeypatch, speed, free) == kind


def test_int4_is_not_taken_where_it_does_not_take_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(LLADA, intermediate=LLADA.intermediate + 8)
    assert chosen(monkeypatch, FOUR, None, config=odd) == chosen(monkeypatch, FOUR, 2, config=odd) == "int8"


def test_what_there_is_nothing_to_choose_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, EIGHT, 40, config=preset("llada-tiny")) is None
    assert chosen(monkeypatch, EIGHT, 40, device=torch.device("cuda")) is None
    assert chosen(monkeypatch, WIDE, 40, stored="int4") == "int4"
    assert resolve_quantization("int4", None, LLADA, torch.bfloat16, CPU, None) == ("int4", "as asked")
    assert resolve_quantization(None, "int8", LLADA, torch.bfloat16, CPU, None) == ("int8", "as in the files")
    assert resolve_quantization(None, None, LLADA, torch.bfloat16, CPU, None)[0] is None


def test_the_choice_is_in_the_start_up_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(capacity, "BFLOAT16_PARAMETERS", 0)
    monkeypatch.setattr(capacity, "int8_kernel", lambda: Kernel("int_mm", speed=(1.1, 3.0, 2.0)))
    monkeypatch.setattr(capacity, "int4_kernel", lambda: Kernel("int_mm", speed=(1.0, 2.0, 2.0)))
    with caplog.at_level(logging.INFO):
        llm = LLM("llada-tiny", load_format="dummy", dtype="float32", device="cpu", threads=1, quantization="auto")
    assert llm.loaded.quantization == "int8"
    assert "(auto: of what fits, times as fast as float32: float32 1.0, int8 1.9, int4 1.6)" in caplog.text
    assert f"({llm.engine.pool.pages * 16} tokens of K/V in bfloat16)" in caplog.text
