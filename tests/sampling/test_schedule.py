import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remask.sampling.schedule import TimeSchedule, even_counts


@given(st.integers(0, 300), st.integers(1, 300))
def test_even_counts_share_all_with_the_remainder_first(masks: int, steps: int) -> None:
    counts = even_counts(masks, steps).tolist()
    assert counts == [masks // steps + (step < masks % steps) for step in range(steps)]
    assert sum(counts) == masks


@pytest.mark.parametrize("eps", [1e-3, 1e-2, 0.1, 0.3, 1e-5, 0.999, 1.0])
def test_times_are_torchs_linspace_bit_for_bit(eps: float) -> None:
    different = [
        steps
        for steps in [*range(1, 300), 511, 512, 513, 1000, 1024, 2047]
        if not np.array_equal(TimeSchedule(steps, eps).times, torch.linspace(1, eps, steps + 1).numpy())
    ]
    assert different == []


def naive_count(steps: int, eps: float, step: int, masks: int) -> int:
    """SEMANTICS section 6, in float32 scalars of PyTorch."""
    if step == steps - 1:
        return masks
    times = torch.linspace(1, eps, steps + 1)
    return int(torch.tensor(masks, dtype=torch.float32) * (1 - times[step + 1] / times[step]))


@given(st.integers(1, 80), st.floats(1e-4, 0.9), st.data())
def test_counts_round_down_in_float32(steps: int, eps: float, data: st.DataObject) -> None:
    step, masks = data.draw(st.integers(0, steps - 1)), data.draw(st.integers(0, 200))
    schedule = TimeSchedule(steps, eps)
    assert schedule.times.dtype == np.float32
    assert schedule.count(step, masks) == naive_count(steps, eps, step, masks)


def test_one_token_a_step_transfers_nothing_first() -> None:
    schedule = TimeSchedule(16, 1e-3)
    left, counts = 16, []
    for step in range(16):
        counts.append(schedule.count(step, left))
        left -= counts[-1]
    assert counts[0] == 0
    assert left == 0


@given(st.integers(1, 60), st.floats(1e-4, 0.9), st.integers(0, 100))
def test_the_schedule_ends_with_nothing_left(steps: int, eps: float, masks: int) -> None:
    schedule = TimeSchedule(steps, eps)
    for step in range(steps):
        assert 0 <= float(schedule.share(step)) <= 1
        masks -= schedule.count(step, masks)
        assert masks >= 0
    assert masks == 0
    assert schedule.share(steps + 3) == 1
