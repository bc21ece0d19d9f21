"""Profiles of operations: parts that add up, FLOPs that were counted, a clock that gives every moment to one name."""

import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from remask import LLM, EngineConfig
from remask.engine.request import Request
from remask.errors import ConfigError
from remask_lab.ops.clock import OPERATIONS, Clock, time_operations
from remask_lab.ops.operations import Profile, StepProfile, profile_operations
from remask_lab.ops.roofline import Peaks, measure_peaks
from tests.engine.support import CPU, Work, make_engine, request, run
from tests.sampling_fields import flat_params

LIMITS = EngineConfig(max_num_seqs=4, max_model_len=64, store_budget_tokens=32)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("llada-tiny", load_format="dummy", dtype="float32", engine=LIMITS)


def work(llm: LLM, cache: str, settings: dict[str, Any], requests: int = 2, **sampling: Any) -> list[Request]:
    params = flat_params(**{"max_tokens": 8, "ignore_eos": True, **sampling})
    prompts = [[*range(1, 21), index] for index in range(requests)]
    return [Request(str(i), p, params, 20, llm.session.policy(cache, settings)) for i, p in enumerate(prompts)]


@pytest.fixture
def ticking() -> Iterator[None]:
    """Every look at the time is a second later."""
    seconds = itertools.count()
    with patch("time.perf_counter", lambda: float(next(seconds))):
        yield


@pytest.mark.usefixtures("ticking")
def test_every_moment_belongs_to_one_operation() -> None:
    clock = Clock(CPU, "rest")
    clock.start()
    with clock.running("outer"):
        with clock.running("inner"), clock.running("inmost"):
            pass
        with clock.running("inner"):
            pass
    assert clock.stop() == {"rest": 2, "outer": 3, "inner": 3, "inmost": 1}
    clock.start()
    assert clock.stop() == {"rest": 1}, "nothing is left of the stretch before"


@pytest.mark.usefixtures("ticking")
def test_time_goes_on_for_others_where_an_operation_fails() -> None:
    clock = Clock(CPU, "rest")
    clock.start()
    with pytest.raises(ValueError, match="bad"), clock.running("a"), clock.running("b"):
        raise ValueError("bad")
    assert clock.stop() == {"rest": 2, "a": 2, "b": 1}


class Event:
    """A CUDA event on a device that takes a millisecond from one to the next."""

    made: list["Event"]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        self.at = len(self.made)
        self.made.append(self)

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, end: "Event") -> float:
        return float(end.at - self.at)


def test_on_cuda_times_are_those_between_events() -> None:
    """Events stand in for a device's: there is none where the tests run."""
    Event.made = []
    with patch.object(torch.cuda, "Event", Event):
        clock = Clock(torch.device("cuda"), "rest")
        clock.start()
        with clock.running("mlp"):
            pass
        assert clock.stop() == {"rest": 2e-3, "mlp": 1e-3}
    assert len(Event.made) == 4


@pytest.mark.parametrize(
    ("cache", "settings", "seen"),
    [
        ("none", {}, set()),
        ("bicache", {"depth": 1, "refresh_interval": 3}, set()),
        ("dllm-cache", {"response_interval": 3, "ratio": 0.5}, {"selection"}),
    ],
)
def test_parts_add_up_and_flops_are_those_counted(
    llm: LLM, cache: str, settings: dict[str, Any], seen: set[str]
) -> None:
    profile = profile_operations(llm, work(llm, cache, settings), rounds=2)
    always = {"projections", "attention", "mlp", "head", "norms", "sampling", "packing", "rest"}
    assert {name for name, each in profile.operations.items() if each.seconds} == always | seen
    assert list(profile.operations)[: len(OPERATIONS)] == list(OPERATIONS)
    assert sum(each.share for each in profile.operations.values()) == pytest.approx(1)
    assert sum(step.executed for step in profile.steps) == profile.counted > 0
    assert len(profile.steps) == 8 + (cache == "bicache"), "a prefix-only pass comes first"
    assert all(step.seconds > 0 and step.row_layers > 0 for step in profile.steps)
    costed = {name for name, each in profile.operations.items() if each.flops}
    assert costed == {"projections", "attention", "mlp", "head"} | seen
    assert profile.overhead > -1


def test_the_first_steps_alone(llm: LLM) -> None:
    profile = profile_operations(llm, work(llm, "none", {}, cfg_scale=1.0, requests=1), steps=3, rounds=1)
    assert len(profile.steps) == 3
    assert profile.steps[0].row_layers == 2 * 29 * llm.loaded.config.layers, "both canvases of a guided request"
    assert not llm.engine.busy


def test_what_cannot_run_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no step to profile"):
        profile_operations(llm, [])
    with pytest.raises(ConfigError, match="max_model_len"):
        profile_operations(llm, work(llm, "none", {}, max_tokens=500))


def test_instruments_change_nothing() -> None:
    item = Work(
        request("r", 12, 8, block_length=4), LLM("llada-tiny", load_format="dummy").session.policy("block-dual")
    )
    engine = make_engine()
    clock = time_operations(engine)
    clock.start()
    watched, plain = run(engine, [item])["r"], run(make_engine(), [item])["r"]
    assert (watched.token_ids, watched.trace, watched.usage) == (plain.token_ids, plain.trace, plain.usage)
    assert set(clock.stop()) == {"projections", "attention", "mlp", "head", "norms", "sampling", "packing", "rest"}


def test_a_roof_is_the_lower_of_two() -> None:
    peaks = Peaks(flops_s=100.0, bytes_s=10.0)
    assert (peaks.ridge, peaks.roof(1), peaks.roof(10), peaks.roof(50)) == (10, 10, 100, 100)


def test_a_step_without_work_has_no_intensity() -> None:
    step = StepProfile(0, 0.5, {"rest": 0.5}, {"mlp": 0}, {"mlp": 0}, 0)
    profile = Profile((step,), 0.0, 0)
    assert (step.intensity, step.flops_s) == (0, 0)
    assert profile.operations["rest"].intensity == profile.operations["rest"].flops_s == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks_are_measured(dtype: torch.dtype) -> None:
    with patch("remask_lab.ops.roofline.SIZES", {"cpu": (64, 1 << 16)}):
        peaks = measure_peaks(CPU, dtype)
    assert peaks.flops_s > 1e6
    assert peaks.bytes_s > 1e6
