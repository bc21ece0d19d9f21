import copy
import inspect
import math
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest

from remask.checks.fields import paths
from remask.denoising.rules import REMASKING
from remask.errors import ConfigError, UnknownNameError
from remask.request.sampling_groups import RemaskingParams, UniformParams
from remask.request.sampling_params import SamplingParams, merge_sampling

NAN, INF = math.nan, math.inf

BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.0, 2.5, "4", True, NAN, INF, [4], None],
    "steps": [0, -4, 4.0, "4", True, NAN, {}],
    "block_length": [0, -8, 8.0, "8", False, NAN],
    "top_k": [0, -1, 1.5, "3", True, NAN],
    "seed": [-(2**63), 1.0, "1", True, NAN],
    "temperature": [-0.1, NAN, INF, -INF, "1", True, [1.0], None],
    "cfg_scale": [-1, NAN, INF, "1", False, None],
    "threshold": [-0.1, 1.1, NAN, INF, "0.9", True],
    "remasking.factor": [-1, NAN, INF, "1", True],
    "top_p": [0, 0.0, -0.5, 1.01, NAN, INF, "0.9", True],
    "remasking.eps": [0, -1e-3, 1.5, NAN, INF, "0.1", True],
    "ignore_eos": [0, 1, "yes", None],
    "remasking": ["", "low-confidence", "LOW_CONFIDENCE", 3],
    "stop": [[""], ["a", ""], "", [1], ["a", None], 5, None],
    "stop_token_ids": [[-1], [1.0], ["1"], [True], 5, "12"],
    "remasking.order": [[1], 5, [[1], 2], [[-1]], "12"],
    "steps_per_block": [0, -1, 2.0, True],
    "uniform.tokens_per_step": [0, 1.5, "1"],
    "uniform.canvas_length": [0, "64"],
    "uniform.initial_canvas": [[-1], [1.5], 5],
    "min_tokens": [-1, 1.5, True],
    "uniform.correction_steps": [-1, 1.5, True],
    "uniform.correction_temperature": [-0.1, "warm"],
    "uniform.correction_tokens": [0, 1.5],
    "remasking.eb_threshold": [-0.1, NAN, "1"],
    "uniform.sampler": ["adaptiv", 1],
    "uniform.schedule": ["cos", 0],
    "remasking.fallback": ["left", 0],
}
CASES = [pytest.param(name, value, id=f"{name}={value!r}") for name, values in BAD.items() for value in values]


def of(path: str, value: Any) -> dict[str, Any]:
    """Parameters in which one field has a value, in its group where it has one."""
    group, _, name = path.rpartition(".")
    rule = {"rule": "order"} if name == "order" else {}
    return {group: {name: value, **rule}} if group else {name: value}


@pytest.mark.parametrize(("name", "value"), CASES)
def test_every_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(name)):
        SamplingParams(**of(name, value))
    if value is not None:
        with pytest.raises(ConfigError, match=re.escape(name)):
            SamplingParams.from_mapping(of(name, value))


@pytest.mark.parametrize(
    "name", ["temperature", "cfg_scale", "threshold", "remasking.factor", "top_p", "remasking.eps"]
)
def test_whole_numbers_beyond_a_float_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams.from_mapping(of(name, 10**400))


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 2},
        {"threshold": 0},
        {"threshold": 1},
        {"top_p": 1},
        {"top_k": 1},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"seed": -(2**63) + 1},
        {"remasking": RemaskingParams(factor=0)},
        {"remasking": RemaskingParams(eps=1e-3)},
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


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError,
        match=r"Unknown sampling parameter 'temprature'. Did you mean 'temperature'\?$",
    ):
        SamplingParams.from_mapping({"temprature": 1})
    with pytest.raises(UnknownNameError, match=r"'zzz'. Available: .*\bmax_tokens\b.*\btop_p\b.*\.$"):
        SamplingParams.from_mapping({"zzz": 1})
    with pytest.raises(UnknownNameError, match=r"'structured'\. Available: "):
        SamplingParams.from_mapping({"structured": 1})


def test_an_unknown_remasking_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown remasking.rule 'entrpy'. Did you mean 'entropy'\?") as caught:
        SamplingParams(remasking="entrpy")
    assert all(name in str(caught.value) for name in REMASKING)


@pytest.mark.parametrize("values", [[], "steps", None, 5, [("steps", 4)]], ids=repr)
def test_only_mappings_make_parameters(values: Any) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        SamplingParams.from_mapping(values)


def test_null_means_the_default() -> None:
    nothing = dict.fromkeys(["max_tokens", "steps", "temperature", "stop", "ignore_eos", "stop_token_ids"])
    assert SamplingParams.from_mapping(nothing) == SamplingParams()


_PLAIN = (".rule", ".confidence_threshold")  # the latter is the name of a rule too


@pytest.mark.parametrize("path", [path for path in paths(SamplingParams) if "." in path and not path.endswith(_PLAIN)])
def test_a_field_of_a_group_is_refused_beside_it_and_says_where_it_stands(path: str) -> None:
    group, _, name = path.partition(".")
    with pytest.raises(ConfigError, match=rf"^{name} belongs in {group}: {group}={{'{name}': \.\.\.}}$"):
        SamplingParams.from_mapping({name: 1})
    with pytest.raises(ConfigError, match=f"^{name} belongs in {group}: "):
        SamplingParams(**{name: 1})  # type: ignore[arg-type]


def test_an_unknown_keyword_is_told_of_as_an_unknown_name_is() -> None:
    with pytest.raises(UnknownNameError, match="Unknown sampling parameter 'temprature'"):
        SamplingParams(max_tokens=4, temprature=1)  # type: ignore[call-arg]
    params = SamplingParams(4, seed=1, remasking="random")
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == replace(params) == params
    assert "max_tokens" in inspect.signature(SamplingParams).parameters
    assert not hasattr(params, "__dict__")


def test_groups_take_objects_mappings_and_a_word() -> None:
    whole = SamplingParams(remasking=RemaskingParams(rule="random"), uniform=UniformParams(preset="s32/b32"))
    assert SamplingParams(remasking="random", uniform="s32/b32") == whole
    assert SamplingParams.from_mapping({"remasking": {"rule": "random"}, "uniform": {"preset": "s32/b32"}}) == whole
    assert whole.non_defaults()["remasking"] == "random"
    with pytest.raises(UnknownNameError, match=r"Unknown remasking field 'remasking\.epss'. Did you mean 'eps'"):
        SamplingParams(remasking={"epss": 1})
    with pytest.raises(ConfigError, match="blocks must be an object of blocks fields, got 'x'"):
        SamplingParams(blocks="x")
    with pytest.raises(
        ConfigError, match=r"^uniform must be one of s32/b32, s512/b512, or an object of uniform fields"
    ):
        SamplingParams(uniform=3)  # type: ignore[arg-type]


def test_parameters_laid_over_others_change_single_fields_of_groups() -> None:
    usual = {"steps": 8, "uniform": {"sampler": "ancestral", "tokens_per_step": 2}, "remasking": {"eps": 0.1}}
    own = {"steps": None, "uniform": {"tokens_per_step": 3}, "remasking": None, "blocks.early_stop": True}
    assert merge_sampling(usual, own) == {
        "uniform": {"sampler": "ancestral", "tokens_per_step": 3},
        "blocks": {"early_stop": True},
    }
    assert merge_sampling(usual, {"uniform": {"sampler": None}})["uniform"] == {"tokens_per_step": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threshold": 0.9, "remasking": {"factor": 1.0}}, r"threshold and remasking.factor are two rules"),
        ({"remasking": "confidence_threshold"}, "needs threshold"),
        ({"max_tokens": 2, "remasking": {"order": [[3, 4]]}}, "go together"),
        ({"max_tokens": 2, "remasking": "order"}, "go together"),
        ({"steps": 8, "steps_per_block": 2}, "steps and steps_per_block say the same"),
        ({"remasking": {"config": {}}}, "remasking.config holds parameters of a rule that has some of its own$"),
        ({"remasking": {"rule": "random", "config": {}}}, "a rule that has some of its own, and 'random' has none"),
    ],
    ids=repr,
)
def test_what_cannot_stand_together_or_alone(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams.from_mapping(values)


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().steps = 3  # type: ignore[misc]
