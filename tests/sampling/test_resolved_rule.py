from typing import Any

import pytest

from remask.denoising.rules import REMASKING
from remask.errors import ConfigError, UnknownNameError
from remask.families import preset
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.masked import Rule, resolve_rule
from tests.sampling_fields import flat_params

FAMILIES = {"llada": preset("llada-tiny").sampling, "dream": preset("dream-tiny").sampling}


def rule(family: str, **values: Any) -> Rule:
    return resolve_rule(flat_params(max_tokens=4, **values), FAMILIES[family])


def read(found: Rule) -> tuple[str, str, float | None, bool]:
    """What the decoder takes from a rule."""
    measure = found.remasking.measure
    return found.remasking.name, "probability" if measure is None else measure.name, found.eps, found.remasking.filtered


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("llada", {}, ("low_confidence", "probability", None, False)),
        ("dream", {}, ("entropy", "negative entropy", 1e-3, True)),
        ("dream", {"threshold": 0.9}, ("low_confidence", "probability", None, False)),
        ("dream", {"factor": 1.0}, ("low_confidence", "probability", None, False)),
        ("dream", {"eps": 0.1}, ("entropy", "negative entropy", 0.1, True)),
        ("llada", {"remasking": "entropy"}, ("entropy", "negative entropy", None, True)),
        ("llada", {"remasking": "entropy", "eps": 0.1}, ("entropy", "negative entropy", 0.1, True)),
        ("llada", {"remasking": "topk_margin"}, ("topk_margin", "margin", None, True)),
        ("dream", {"remasking": "topk_margin"}, ("topk_margin", "margin", 1e-3, True)),
        ("dream", {"remasking": "maskgit_plus"}, ("maskgit_plus", "probability", 1e-3, True)),
        ("llada", {"remasking": "origin"}, ("origin", "probability", 1e-3, True)),
        ("dream", {"remasking": "origin", "eps": 0.5}, ("origin", "probability", 0.5, True)),
        ("dream", {"remasking": "random"}, ("random", "probability", None, False)),
        ("dream", {"remasking": "low_confidence"}, ("low_confidence", "probability", None, False)),
        (
            "llada",
            {"remasking": "confidence_threshold", "threshold": 0.5},
            ("confidence_threshold", "probability", None, True),
        ),
    ],
)
def test_the_familys_choices_are_filled_in(
    family: str, values: dict[str, Any], expected: tuple[str, str, float | None, bool]
) -> None:
    assert read(rule(family, **values)) == expected


@pytest.mark.parametrize("name", ["threshold", "factor"])
@pytest.mark.parametrize("remasking", [name for name, rule in REMASKING.items() if not rule.thresholds])
def test_thresholds_compare_probabilities(name: str, remasking: str) -> None:
    order = [[1, 2, 3, 4]] if remasking == "order" else None
    with pytest.raises(ConfigError, match=f"{name} compares probabilities.*not {remasking}"):
        rule("llada", remasking=remasking, order=order, **{name: 0.5})


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("remasking", ["low_confidence", "random", "order"])
def test_eps_needs_a_time_schedule(family: str, remasking: str) -> None:
    order = [[1, 2, 3, 4]] if remasking == "order" else None
    with pytest.raises(ConfigError, match="eps shapes Dream's time schedule"):
        rule(family, remasking=remasking, eps=0.1, order=order)


def test_eps_needs_a_rule_that_counts() -> None:
    """A threshold decides alone; an eps beside it would be silently dropped."""
    with pytest.raises(ConfigError, match="eps"):
        rule("dream", remasking="maskgit_plus", threshold=0.9, eps=0.1)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_under_block_caches_a_confidence_threshold_has_no_budget(family: str) -> None:
    params = SamplingParams(max_tokens=4, remasking="confidence_threshold", threshold=0.5)
    assert read(resolve_rule(params, FAMILIES[family], blockwise=True)) == ("maskgit_plus", "probability", None, True)
    assert resolve_rule(params, FAMILIES[family], blockwise=False).remasking.name == "confidence_threshold"


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"threshold": 0.5},
        {"factor": 1.0},
        {"remasking": "entropy"},
        {"remasking": "random"},
        {"remasking": "origin"},
    ],
    ids=repr,
)
def test_block_caches_change_no_other_rule(family: str, values: dict[str, Any]) -> None:
    params = flat_params(max_tokens=4, **values)
    assert resolve_rule(params, FAMILIES[family], blockwise=True) == resolve_rule(params, FAMILIES[family])


@pytest.mark.parametrize("name", [None, "threshold", "factor"])
def test_a_familys_rule_stands_where_it_can(name: str | None) -> None:
    """A threshold keeps a default that compares probabilities, and replaces one that does not."""
    values: dict[str, Any] = {} if name is None else {name: 0.5}
    params = flat_params(max_tokens=4, **values)
    plus = resolve_rule(params, SamplingDefaults(remasking="maskgit_plus"))
    assert read(plus) == ("maskgit_plus", "probability", None, True)
    margin = resolve_rule(params, SamplingDefaults(remasking="topk_margin"))
    assert margin.remasking.name == ("topk_margin" if name is None else "low_confidence")


def test_a_family_names_a_rule_that_exists() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'entropy'"):
        SamplingDefaults(remasking="entrpy")
