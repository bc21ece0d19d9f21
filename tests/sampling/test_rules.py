from typing import Any

import pytest

from remask.core.sampling import REMASKING, SamplingParams
from remask.errors import ConfigError
from remask.sampling.rules import Rule, resolve


def rule(family: str, **values: Any) -> Rule:
    return resolve(SamplingParams(max_tokens=4, **values), family)


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("llada", {}, Rule("low_confidence", "probability", None, False)),
        ("dream", {}, Rule("entropy", "entropy", 1e-3, True)),
        ("dream", {"threshold": 0.9}, Rule("low_confidence", "probability", None, False)),
        ("dream", {"factor": 1.0}, Rule("low_confidence", "probability", None, False)),
        ("dream", {"eps": 0.1}, Rule("entropy", "entropy", 0.1, True)),
        ("llada", {"remasking": "entropy"}, Rule("entropy", "entropy", None, True)),
        ("llada", {"remasking": "entropy", "eps": 0.1}, Rule("entropy", "entropy", 0.1, True)),
        ("llada", {"remasking": "topk_margin"}, Rule("topk_margin", "margin", None, True)),
        ("dream", {"remasking": "topk_margin"}, Rule("topk_margin", "margin", 1e-3, True)),
        ("dream", {"remasking": "maskgit_plus"}, Rule("maskgit_plus", "probability", 1e-3, True)),
        ("llada", {"remasking": "origin"}, Rule("origin", "probability", 1e-3, True)),
        ("dream", {"remasking": "origin", "eps": 0.5}, Rule("origin", "probability", 0.5, True)),
        ("dream", {"remasking": "random"}, Rule("random", "probability", None, False)),
        ("dream", {"remasking": "low_confidence"}, Rule("low_confidence", "probability", None, False)),
        (
            "llada",
            {"remasking": "confidence_threshold", "threshold": 0.5},
            Rule("confidence_threshold", "probability", None, True),
        ),
    ],
)
def test_the_familys_choices_are_filled_in(family: str, values: dict[str, Any], expected: Rule) -> None:
    assert rule(family, **values) == expected


@pytest.mark.parametrize("name", ["threshold", "factor"])
@pytest.mark.parametrize(
    "remasking", [n for n in REMASKING if n not in ("low_confidence", "maskgit_plus", "confidence_threshold")]
)
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
    assert resolve(params, family, blockwise=True) == Rule("maskgit_plus", "probability", None, True)
    assert resolve(params, family, blockwise=False).remasking == "confidence_threshold"


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
    params = SamplingParams(max_tokens=4, **values)
    assert resolve(params, family, blockwise=True) == resolve(params, family)


@pytest.mark.parametrize("remasking", REMASKING)
def test_positions_are_known_beforehand_where_confidence_has_no_say(remasking: str) -> None:
    values: dict[str, Any] = {"remasking": remasking}
    if remasking == "order":
        values["order"] = [[1, 2, 3, 4]]
    if remasking == "confidence_threshold":
        values["threshold"] = 0.5
    assert rule("llada", **values).ordered == (remasking in ("order", "random"))
