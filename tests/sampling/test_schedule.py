import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from remask.sampling.schedule import TimeSchedule, even_count


@given(st.integers(0, 300), st.integers(1, 300))
def test_even_count_share_all_with_the_remainder_first(masks: int, steps: int) -> None:
    counts = [even_count(masks, steps, step) for step in range(steps)]
    assert counts == [masks // steps + (step < masks % steps) for step in range(steps)]
    assert sum(counts) == masks


def times(schedule: TimeSchedule) -> NDArray[np.float32]:
    return np.array([schedule.time(index) for index in range(schedule.steps + 1)])


@pytest.mark.parametrize("eps", [1e-3, 1e-2, 0.1, 0.3, 1e-5, 0.999, 1.0])
def test_times_are_torchs_linspace_bit_for_bit(eps: float) -> None:
    different = [
        steps
        for steps in [*range(1, 300), 511, 512, 513, 1000, 1024, 2047]
        if not np.array_equal(times(TimeSchedule(steps, eps)), torch.linspace(1, eps, steps + 1).numpy())
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


@settings(deadline=None)
@given(st.integers(1, 6000), st.one_of(st.floats(1e-7, 1.0), st.sampled_from([1e-3, 0.999, 1.0])), st.data())
def test_the_next_busy_step_is_the_first_that_a_search_finds(steps: int, eps: float, data: st.DataObject) -> None:
    schedule = TimeSchedule(steps, eps)
    step, masks = data.draw(st.integers(0, steps + 2)), data.draw(st.integers(1, 5000))
    found = next(later for later in range(step, steps + 3) if schedule.count(later, masks))
    assert schedule.busy(step, masks) == found


@pytest.mark.parametrize("masks", [1, 3, 64, 4096])
def test_a_thousand_million_steps_take_no_time(masks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, count, looked = TimeSchedule(2**30, 1e-3), TimeSchedule.count, 0

    def counted(self: TimeSchedule, step: int, left: int) -> int:
        nonlocal looked
        looked += 1
        return count(self, step, left)

    monkeypatch.setattr(TimeSchedule, "count", counted)
    busy = schedule.busy(0, masks)
    assert count(schedule, busy, masks) > 0
    assert 0 < looked < 3000
