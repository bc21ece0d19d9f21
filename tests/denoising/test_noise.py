"""Noise against recorded distributions; the time schedule against PyTorch's arithmetic."""

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from remask.denoising.noise import Noise, sigmoid
from remask.sampling.blocks import TimeSchedule
from tests.goldens import uniform as goldens

MASK, VOCAB = 3, 50


def noise_of(shift: float, vocab: int = VOCAB) -> Noise:
    return Noise(shift, -9.0, 9.0, vocab, MASK)


def test_mixing_distributions_are_the_recorded_ones() -> None:
    common, tensors = goldens.sampling("torch_steps")
    recorded = {key: pi.numpy() for key, pi in tensors.items() if key.startswith("pi.")}
    assert len(recorded) == 20
    for key, expected in recorded.items():
        shift, log_snr = map(float, key.removeprefix("pi.nt").split(".ls"))
        noise = Noise(shift, -9.0, 9.0, common["vocab_size"], common["mask_token_id"])
        every = np.arange(noise.vocab)
        np.testing.assert_allclose(noise.probability(every, log_snr), expected, rtol=0, atol=1e-7)


def test_the_share_of_uniform_tokens_on_a_fresh_canvas() -> None:
    for shift, expected in goldens.sampling("torch_steps")[0]["prior_uniform_probability_by_noise_type"].items():
        assert noise_of(float(shift)).uniform_probability(-9.0) == pytest.approx(expected, abs=1e-7)


def test_pure_noise_is_exact_at_every_level() -> None:
    every = np.arange(VOCAB)
    for log_snr in (-9.0, 0.0, 9.0):
        uniform, masks = (noise_of(shift).probability(every, log_snr) for shift in (1000.0, -1000.0))
        assert uniform[MASK] == 0
        assert np.delete(uniform, MASK).tolist() == [1 / (VOCAB - 1)] * (VOCAB - 1)
        assert masks[MASK] == 1
        assert masks.sum() == 1
    assert noise_of(-1000.0).has_only_masks
    assert not noise_of(1000.0).has_only_masks
    assert not noise_of(-15.0).has_only_masks, "hybrid noise is masks alone at its noisiest only"


def test_a_canvas_of_uniform_noise_holds_every_token_but_the_mask() -> None:
    drawn = noise_of(1000.0).draw(20_000, seed=1)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts[MASK] == 0
    assert counts.argmin() == MASK
    expected = 20_000 / (VOCAB - 1)
    assert (abs(np.delete(counts, MASK) - expected) < 6 * math.sqrt(expected)).all()


@pytest.mark.parametrize("mask", [0, VOCAB - 1])
def test_the_mask_may_be_any_token(mask: int) -> None:
    drawn = Noise(1000.0, -9.0, 9.0, VOCAB, mask).draw(2_000, seed=1)
    assert set(drawn.tolist()) == set(range(VOCAB)) - {mask}


def test_noise_without_a_mask_holds_every_token() -> None:
    noise = Noise(1000.0, -9.0, 9.0, 7, -1)
    counts = np.bincount(noise.draw(7000, seed=1), minlength=7)
    assert len(counts) == 7
    assert counts.min() > 850
    np.testing.assert_array_equal(noise.probability(np.arange(7), 0.0), np.full(7, 1 / 7))


def test_a_canvas_of_masks_and_one_of_both() -> None:
    assert (noise_of(-1000.0).draw(100, seed=1) == MASK).all()
    drawn = noise_of(9.0).draw(20_000, seed=1)  # at log-SNR -9 one half each
    assert abs((drawn == MASK).mean() - 0.5) < 0.02


@pytest.mark.parametrize("x", [-1009.0, -701.0, -699.0, -100.0, -9.0, -0.5, 0.0, 0.5, 9.0, 17.0, 1009.0])
def test_sigmoid_is_float32s(x: float) -> None:
    assert sigmoid(x) == pytest.approx(float(torch.tensor(x).sigmoid()), rel=1e-6, abs=1e-37)
    assert sigmoid(1000.0) == 1
    assert sigmoid(-1000.0) == 0


def times(schedule: TimeSchedule) -> NDArray[np.float32]:
    return np.array([schedule.time(index) for index in range(schedule.steps + 1)])


@pytest.mark.parametrize(
    ("eps", "checksum"),
    [
        (1e-3, 3625617156),
        (1e-2, 4210980117),
        (0.1, 618957836),
        (0.3, 193892536),
        (1e-5, 3492955117),
        (0.999, 1163109062),
        (1.0, 2943725030),
    ],
)
def test_times_are_torchs_linspace_bit_for_bit(eps: float, checksum: int) -> None:
    """That of its kernels for AVX2 and AVX-512, whose checksums these are; without these it rounds once more."""
    found = 0
    for steps in [*range(1, 300), 511, 512, 513, 1000, 1024, 2047]:
        own = times(TimeSchedule(steps, eps))
        found = zlib.crc32(own.tobytes(), found)
        np.testing.assert_array_max_ulp(own, torch.linspace(1, eps, steps + 1).numpy(), maxulp=1)
    assert found == checksum


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
    assert schedule.next_busy_step(step, masks) == found


@pytest.mark.parametrize("masks", [1, 3, 64, 4096])
def test_a_thousand_million_steps_take_no_time(masks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, count, looked = TimeSchedule(2**30, 1e-3), TimeSchedule.count, 0

    def counted(self: TimeSchedule, step: int, left: int) -> int:
        nonlocal looked
        looked += 1
        return count(self, step, left)

    monkeypatch.setattr(TimeSchedule, "count", counted)
    busy = schedule.next_busy_step(0, masks)
    assert count(schedule, busy, masks) > 0
    assert 0 < looked < 3000
