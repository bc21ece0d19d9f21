import math
from typing import Any

import pytest

from remask.errors import ConfigError, UnknownNameError
from remask.remasking.rules import REMASKING
from remask.remasking.slowfast import SlowFastKnobs
from remask.request.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf

BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.0, 2.5, "4", True, NAN, INF, [4], None],
    "steps": [0, -4, 4.0, "4", True, NAN, {}],
    "block_length": [0, -8, 8.0, "8", False, NAN],
    "top_k": [0, -1, 1.5, "3", True, NAN],
    "seed": [-1, 1.0, "1", True, NAN],
    "temperature": [-0.1, NAN, INF, -INF, "1", True, [1.0], None],
    "cfg_scale": [-1, NAN, INF, "1", False, None],
    "threshold": [-0.1, 1.1, NAN, INF, "0.9", True],
    "factor": [-1, NAN, INF, "1", True],
    "top_p": [0, 0.0, -0.5, 1.01, NAN, INF, "0.9", True],
    "eps": [0, -1e-3, 1.5, NAN, INF, "0.1", True],
    "ignore_eos": [0, 1, "yes", None],
    "remasking": ["", "low-confidence", "LOW_CONFIDENCE", 3],
    "stop": [[""], ["a", ""], "", [1], ["a", None], 5, None],
    "stop_token_ids": [[-1], [1.0], ["1"], [True], 5],
    "order": [[1], 5, [[1], 2], [[-1]]],
    "steps_per_block": [0, -1, 2.0, True],
    "tokens_per_step": [0, 1.5, "1"],
    "canvas_length": [0, "64"],
    "initial_canvas": [[-1], [1.5], 5],
    "min_tokens": [-1, 1.5, True],
    "correction_steps": [-1, 1.5, True],
    "correction_temperature": [-0.1, "warm"],
    "correction_tokens": [0, 1.5],
    "eb_threshold": [-0.1, NAN, "1"],
    "sampler": ["adaptiv", 1],
    "schedule": ["cos", 0],
    "fallback": ["left", 0],
}
CASES = [pytest.param(name, value, id=f"{name}={value!r}") for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_every_bad_value_is_named(name: str, value: Any) -> None:
    extra: dict[str, Any] = {"remasking": "order"} if name == "order" else {}
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value}, **extra)
    assert name in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [case for case in CASES if case.values[1] is not None])
def test_every_bad_value_is_named_from_a_mapping_too(name: str, value: Any) -> None:
    extra: dict[str, Any] = {"remasking": "order"} if name == "order" else {}
    with pytest.raises(ConfigError) as caught:
        SamplingParams.from_mapping({name: value, **extra})
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["temperature", "cfg_scale", "threshold", "factor", "top_p", "eps"])
def test_whole_numbers_beyond_a_float_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams.from_mapping({name: 10**400})


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 2},
        {"threshold": 0},
        {"threshold": 1},
        {"factor": 0},
        {"top_p": 1},
        {"top_k": 1},
        {"eps": 1e-3},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"stop": "ab"},
        {"stop": ["ab", "c"]},
        {"stop_token_ids": [0, 5]},
        {"ignore_eos": True},
        {"cfg_scale": 1.5},
        {"max_tokens": 8, "steps": 64, "block_length": 4},
    ],
    ids=repr,
)
def test_good_values_stay_as_they_are(values: dict[str, Any]) -> None:
    params = SamplingParams.from_mapping(values)
    for name, value in values.items():
        assert getattr(params, name) == ((value,) if name == "stop" and isinstance(value, str) else value)


def test_one_stop_text_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError,
        match=r"Unknown sampling parameter 'temprature'. Did you mean 'temperature', 'correction_t\w+' or '\w+'\?$",
    ):
        SamplingParams.from_mapping({"temprature": 1})
    with pytest.raises(UnknownNameError, match=r"'zzz'. Did you mean '\w+', '\w+' or '\w+'\?$"):
        SamplingParams.from_mapping({"zzz": 1})


def test_an_unknown_remasking_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown remasking 'entrpy'. Did you mean 'entropy'\?") as caught:
        SamplingParams(remasking="entrpy")
    assert all(name in str(caught.value) for name in REMASKING)


@pytest.mark.parametrize("values", [[], "steps", None, 5, [("steps", 4)]], ids=repr)
def test_only_mappings_make_parameters(values: Any) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        SamplingParams.from_mapping(values)


def test_null_means_the_default() -> None:
    nothing = dict.fromkeys(["max_tokens", "steps", "temperature", "stop", "ignore_eos", "stop_token_ids"])
    assert SamplingParams.from_mapping(nothing) == SamplingParams()


def test_threshold_and_factor_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="threshold and factor are two rules"):
        SamplingParams(threshold=0.9, factor=1.0)


def test_confidence_threshold_needs_its_threshold() -> None:
    with pytest.raises(ConfigError, match="needs threshold"):
        SamplingParams(remasking="confidence_threshold")


def test_order_and_its_rule_go_together() -> None:
    with pytest.raises(ConfigError, match="go together"):
        SamplingParams(max_tokens=2, order=[[3, 4]])
    with pytest.raises(ConfigError, match="go together"):
        SamplingParams(max_tokens=2, remasking="order")


def test_steps_are_given_in_one_way() -> None:
    with pytest.raises(ConfigError, match="steps and steps_per_block say the same"):
        SamplingParams(steps=8, steps_per_block=2)


@pytest.mark.parametrize("name", ["order", "stop_token_ids"])
def test_lists_from_a_mapping_are_lists(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a list"):
        SamplingParams.from_mapping({name: "12", "remasking": "order"})


KNOBS: dict[str, list[Any]] = {
    "slow_tokens": [0, 1.0, "1", True],
    "slow_steps": [0, -1, 2.5],
    "window": [0, "2", False],
    "min_confidence": [-0.1, 1.1, NAN, "0.1"],
    "threshold": [-0.1, 2, INF, True],
    "variance": [-1, NAN, INF, "1"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in KNOBS.items() for value in values])
def test_bad_knobs_of_slowfast_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"slowfast.{name} must be"):
        SamplingParams.from_mapping({"remasking": "slowfast", "slowfast": {name: value}})


def test_slowfast_takes_knobs_and_has_defaults() -> None:
    assert SamplingParams(remasking="slowfast").slowfast == SlowFastKnobs()
    given = {"threshold": 0.5, "slow_steps": 4, "window": None}
    params = SamplingParams.from_mapping({"remasking": "slowfast", "slowfast": given})
    assert params.slowfast == SlowFastKnobs(threshold=0.5, slow_steps=4)
    assert SamplingParams(remasking="slowfast", slowfast=SlowFastKnobs(window=3)).slowfast == SlowFastKnobs(window=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slowfast": {}}, "slowfast holds the knobs of remasking='slowfast'; set both, or neither"),
        ({"remasking": "random", "slowfast": {}}, "set both, or neither"),
        ({"remasking": "slowfast", "slowfast": 3}, "slowfast must be an object of slowfast knobs, got 3"),
        (
            {"remasking": "slowfast", "slowfast": {"treshold": 1}},
            r"Unknown slowfast knob 'treshold'. Did you mean 'threshold'",
        ),
        ({"remasking": "slowfast", "steps": 4}, "follows no schedule, so steps=4 has no part in it; leave steps out"),
        ({"remasking": "slowfast", "steps_per_block": 2}, "so steps_per_block=2 has no part in it; leave steps_per_b"),
    ],
    ids=repr,
)
def test_what_slowfast_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams.from_mapping(values)


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().steps = 3  # type: ignore[misc]
