"""Short measurements of products: what counts, and what they come to."""

import pytest
import torch
from torch import Tensor

from remask.model import cpu_kernels
from remask.model.cpu_kernels import ROWS, SIDE, Kernel, average, dtype_speeds, speeds


class Clock:
    """A clock that products move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(cpu_kernels, "time", made)
    monkeypatch.setattr(cpu_kernels, "_OTHERS", 16)
    return made


def test_the_least_time_counts_but_for_the_first_call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "_float32", lambda: (6.0, 6.0, 12.0))
    taken: dict[int, list[float]] = {1: [0.1, 9, 3, 9, 9, 9], 32: [0.1, 2, 2, 2, 2, 2], 128: [9, 9, 9, 9, 9, 8]}
    shapes = []

    def act(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        clock.now += taken[len(x)].pop(0)
        return x

    assert speeds(act) == pytest.approx((2, 3, 1.5))
    assert shapes == [(count, SIDE) for count in ROWS for _ in range(6)]
    assert not any(taken.values())


def test_speeds_of_a_dtype_are_beside_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dtype_speeds(torch.float32) == (1, 1, 1)
    monkeypatch.setattr(cpu_kernels, "speeds", lambda act: (float(act(torch.ones(2, SIDE))[0, 0]),))
    assert dtype_speeds.__wrapped__(torch.bfloat16) == (SIDE,)


def test_few_rows_count_as_much_as_many() -> None:
    assert average((1.0, 8.0, 1.0)) == pytest.approx(2) == average((8.0, 1.0, 1.0))
    assert str(Kernel("int_mm", True, (1.0, 2.04, 3.0))) == (
        "int_mm on rows of seven bits, 1.0, 2.0, 3.0 times as fast as float32 at 1, 32, 128 rows"
    )
