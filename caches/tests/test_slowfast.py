"""SlowFast sampling: each stage by itself, and whole blocks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask_caches.slowfast import SlowFast, SlowFastConfig
from tests.sampling.test_masked import Bench, Idle


class Block:
    """A block of positions from 10 on, fed with confidences."""

    def __init__(self, length: int, **knobs: Any) -> None:
        self.sampler = SlowFast(SlowFastConfig(**knobs))
        self.noisy = list(range(10, 10 + length))

    def step(self, confidence: Sequence[float]) -> list[int]:
        """One step; `confidence` is of the whole block. Returns what was transferred."""
        values = np.array([confidence[p - 10] for p in self.noisy], dtype=np.float32)
        chosen = self.sampler.choose(np.array(self.noisy), values)
        taken = [self.noisy[i] for i in chosen]
        self.noisy = [p for p in self.noisy if p not in taken]
        return taken


def test_a_slow_step_takes_all_that_are_sure_where_there_are_two() -> None:
    block = Block(4, slow_threshold=0.8)
    assert block.step([0.1, 0.8, 0.2, 0.9]) == [11, 13]
    assert block.step([0.85, 0.0, 0.2, 0.0]) == [10], "one alone is no reason"
    block = Block(4, slow_threshold=0.8, slow_tokens=3)
    assert block.step([0.1, 0.8, 0.2, 0.9]) == [11, 12, 13]


def test_the_variance_of_the_end_over_the_window_decides() -> None:
    """Ends 12 and 14 have a variance of 1, which must be below the limit."""
    for variance, stable in ((1.01, True), (1.0, False)):
        block = Block(6, min_confidence=0.5, variance=variance)
        block.step([0.9, 0.1, 0.5, 0.1, 0.1, 0.1])
        block.step([0.1, 0.1, 0.9, 0.1, 0.6, 0.1])
        assert (block.sampler.end == 14) is stable


def test_exploring_ends_after_so_many_steps_at_the_mean_of_the_window() -> None:
    block = Block(9, min_confidence=0.5, slow_steps=3, window=2, variance=1.0)
    for last in (2, 5, 8):
        assert block.sampler.end is None
        block.step([0.6 if p == last else 0.9 * (p == 0) for p in range(9)])
    assert block.sampler.end == 16, "15 and 18, rounded down"


def test_without_an_early_end_all_slow_steps_are_taken_and_the_first_stable_end_counts() -> None:
    ends = (3, 3, 6, 7)
    for early, steps in ((True, 2), (False, 4)):
        block = Block(9, min_confidence=0.5, slow_steps=4, leave_early=early)
        for last in ends[:steps]:
            assert block.sampler.end is None
            block.step([0.6 if p == last else 0.7 if p < 3 else 0.1 for p in range(9)])
        assert block.sampler.end == 13
    block = Block(9, min_confidence=0.5, slow_steps=3, leave_early=False)
    for last in (2, 5, 8):
        block.step([0.6 if p == last else 0.9 * (p == 0) for p in range(9)])
    assert block.sampler.end == 16, "none was stable"


def test_an_empty_span_begins_the_next_cycle() -> None:
    """The mean of the ends may stand before every position that is left."""
    block = Block(6, min_confidence=0.5, slow_steps=2, variance=0.0)
    block.step([0.9, 0.1, 0.1, 0.1, 0.1, 0.1])
    block.step([0.0, 0.6, 0.1, 0.1, 0.1, 0.1])
    assert block.sampler.end == 10
    assert block.step([0.0, 0.0, 0.1, 0.2, 0.1, 0.1]) == [13]
    assert block.sampler.end is None


def test_fast_steps_but_the_first_leave_out_what_stands_after_the_span() -> None:
    for cut, expected in ((True, 14), (False, None)):
        block = Block(6, min_confidence=0.5, window=1, threshold=0.8, cut_tail=cut)
        block.step([0.9, 0.1, 0.1, 0.6, 0.1, 0.1])
        assert (block.sampler.end, block.sampler.cut) == (13, None), "the first fast step is whole"
        assert block.step([0.0, 0.9, 0.1, 0.1, 0.9, 0.9]) == [11]
        assert block.sampler.cut == expected
        assert block.step([0.0, 0.0, 0.9, 0.1, 0.9, 0.9]) == [12]
        assert block.step([0.0, 0.0, 0.0, 0.1, 0.9, 0.9]) == [13]
        assert block.sampler.cut is None, "so is the next slow one"


@given(st.data())
def test_every_block_is_filled_from_spans_in_order(data: st.DataObject) -> None:
    """A fast step stays within its span, and a slow one takes as many as it may."""
    length = data.draw(st.integers(1, 12))
    knobs = {
        "slow_tokens": data.draw(st.integers(1, 3)),
        "slow_steps": data.draw(st.integers(1, 4)),
        "min_confidence": data.draw(st.sampled_from([0.0, 0.3, 0.9])),
        "window": data.draw(st.integers(1, 3)),
        "variance": data.draw(st.sampled_from([0.0, 1.0, 9.0])),
        "threshold": data.draw(st.sampled_from([0.2, 0.6, 1.0])),
    }
    block = Block(length, **knobs)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    slow = 0
    while block.noisy:
        before, end = list(block.noisy), block.sampler.end
        exploring = end is None or before[0] > end
        taken = block.step(rng.random(length).tolist())
        assert taken
        if exploring:
            slow = slow + 1 if end is None else 1
            assert len(taken) <= knobs["slow_tokens"]
            assert slow <= knobs["slow_steps"]
        else:
            assert end is not None
            assert max(taken) <= end
    assert not block.noisy


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(["llada", "dream"]), st.integers(0, 99))
def test_decoders_end_with_every_position_transferred_once(block: int, blocks: int, family: str, seed: int) -> None:
    idle: tuple[Idle, ...] = ("skipped", "within_block", "all")
    runs = []
    for mode in idle:
        bench = Bench(family, mode, max_tokens=block * blocks, block_length=block, remasking="slowfast")
        runs.append(bench.run(np.random.default_rng(seed).random(40)))
        assert bench.decoder.step == len(runs[-1])
    flat = [p for chosen in runs[0] for p in chosen]
    assert sorted(flat) == list(range(3, 3 + block * blocks))
    assert [(p - 3) // block for p in flat] == sorted((p - 3) // block for p in flat)
    assert runs[0] == runs[1] == runs[2]


def test_every_block_explores_anew() -> None:
    bench = Bench(max_tokens=6, block_length=3, remasking="slowfast", config={"window": 2, "threshold": 0.0})
    assert [len(chosen) for chosen in bench.run()] == [1, 1, 1, 1, 1, 1]
    bench = Bench(max_tokens=6, remasking="slowfast", config={"window": 2, "threshold": 0.0})
    assert [len(chosen) for chosen in bench.run()] == [1, 1, 4]


WRONG: dict[str, list[Any]] = {
    "slow_tokens": [0, 1.0, "1", True],
    "slow_steps": [0, -1, 2.5],
    "window": [0, "2", False],
    "min_confidence": [-0.1, 1.1, float("nan"), "0.1"],
    "threshold": [-0.1, 2, float("inf"), True],
    "variance": [-1, float("nan"), float("inf"), "1"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_bad_parameters_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"remasking.config.{name} must be"):
        SamplingParams.from_mapping({"remasking": {"rule": "slowfast", "config": {name: value}}})


def test_the_rule_gets_its_parameters_and_their_defaults() -> None:
    assert SamplingParams(remasking="slowfast").knobs.config == SlowFastConfig()
    given = {"threshold": 0.5, "slow_steps": 4, "window": None}
    params = SamplingParams.from_mapping({"remasking": {"rule": "slowfast", "config": given}})
    assert params.knobs.config == SlowFastConfig(threshold=0.5, slow_steps=4)
    assert SamplingParams.from_mapping(params.non_defaults()) == params


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"remasking": {"rule": "slowfast", "config": 3}}, "remasking.config must be an object"),
        (
            {"remasking": {"rule": "slowfast", "config": {"treshold": 1}}},
            "remasking.config.treshold'. Did you mean",
        ),
        ({"remasking": "slowfast", "steps": 4}, "follows no schedule, so steps=4 has no part in it; leave steps out"),
        ({"remasking": "slowfast", "steps_per_block": 2}, "so steps_per_block=2 has no part in it; leave steps_per_b"),
    ],
    ids=repr,
)
def test_what_cannot_stand_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams.from_mapping(values)
