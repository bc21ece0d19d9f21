"""Rules against depths counted by hand, and against the answers that the bundled model gives."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.tests.similarity.tables import AUTHORS

from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.similarity.conversations import TokenPrompts
from remask_lab.similarity.probe import limits_of
from remask_lab.similarity.profile import profile, request_depths, rule_limits
from remask_lab.similarity.rule import (
    AT_BOUNDARY,
    OVER_LAYERS,
    OVER_REQUESTS,
    DepthRule,
    ProfileSettings,
    depth_at,
    depth_entries,
)
from tests.goldens import tariff

TAU = 0.97
RULES = [DepthRule(*parts) for parts in product(OVER_LAYERS, OVER_REQUESTS, AT_BOUNDARY)]
CURVES = st.integers(1, 6).flatmap(
    lambda layers: st.lists(
        st.lists(st.sampled_from([0.5, 0.9, 0.96, 0.97, 0.98, 1.0]), min_size=layers, max_size=layers),
        min_size=1,
        max_size=7,
    )
)


def depth_of(curve: Sequence[float], rule: DepthRule) -> int:
    """The depth of one curve, from the rule's words."""
    layers = len(curve)
    leading = len(list(takewhile(lambda value: value > TAU, curve)))
    largest = max((layer for layer, value in enumerate(curve, 1) if value > TAU), default=0)
    reached = leading if rule.layers == "leading" else largest
    if rule.boundary == "paper" or reached == layers:
        return reached
    return max(reached - 1, 0)


@given(CURVES, st.sampled_from(RULES))
def test_tables_are_what_the_words_say(curves: list[list[float]], rule: DepthRule) -> None:
    measured = [np.array([curve]) for curve in curves]
    depths = [depth_of(curve, rule) for curve in curves]
    expected = min(depths) if rule.requests == "least-depth" else math.floor(np.mean(depths) + 1e-9)
    if rule.requests == "mean-curve":
        expected = depth_of(np.mean(curves, axis=0).round(6).tolist(), rule)
    limits = rule_limits(rule, (50,), measured)
    assert depth_at(limits[50], TAU) == expected
    assert list(limits[50]) == sorted(limits[50], reverse=True)
    assert request_depths(rule, (50,), measured, TAU) == {50: round(float(np.mean(depths)), 3)}


@given(CURVES, st.sampled_from(RULES))
def test_a_higher_tau_is_never_deeper(curves: list[list[float]], rule: DepthRule) -> None:
    (limits,) = rule_limits(rule, (50,), [np.array([curve]) for curve in curves]).values()
    depths = [depth_at(limits, tau) for tau in (0.4, 0.95, 0.97, 0.99)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == len(limits)


@pytest.mark.parametrize(
    ("curve", "paper", "safe"),
    [
        ([1.0, 0.99, 0.98, 0.98, 0.98, 0.92, 0.82, 0.74], 5, 4),
        ([1.0, 0.9, 0.9, 0.9], 1, 0),
        ([1.0, 0.99, 0.98, 0.98], 4, 4),
        ([1.0, 0.99, 0.98, 0.9], 3, 2),
        ([1.0, 0.99, 0.98, 0.97], 3, 2),
        ([1.0], 1, 1),
        ([0.9, 1.0], 0, 0),
    ],
)
def test_the_layer_above_the_depth_must_exceed_tau_too(curve: list[float], paper: int, safe: int) -> None:
    for boundary, expected in (("paper", paper), ("safe", safe)):
        rule = DepthRule(boundary=boundary)  # type: ignore[arg-type]
        assert depth_at(limits_of(rule, np.array(curve)).tolist(), TAU) == expected


def test_entries_grow() -> None:
    curves = {50: [1.0, 0.99, 0.5], 10: [1.0, 0.5, 0.5], 70: [1.0, 0.9, 0.9], 90: [1.0, 1.0, 1.0], 5: [0.1, 1.0, 1.0]}
    limits = {ratio: limits_of(AUTHORS, np.array(curve)).tolist() for ratio, curve in curves.items()}
    assert depth_entries(limits, TAU) == {10: 1, 50: 2, 90: 3}


@pytest.mark.parametrize("part", ["layers", "requests", "boundary"])
def test_unknown_parts_are_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        DepthRule(**{part: "other"})  # type: ignore[arg-type]


QUICK = ProfileSettings(ratios=(80, 85), samples=6, canvas=144, response=8)
COUNT = len(tariff.lines())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tariff.open_model()


@pytest.fixture(scope="module")
def prompts() -> TokenPrompts:
    return TokenPrompts("its requests", tuple(tuple(line["prompt_token_ids"]) for line in tariff.lines()))


def right(llm: LLM, cache: str, **settings: object) -> int:
    policy = llm.session.policy(cache, settings)
    work = [request.with_policy(policy) for request in tariff.requests()]
    found = {output.id: output for output in llm.session.run(work, engine=llm.session.new_engine(), progress=False)}
    return tariff.right({name: output.token_ids for name, output in found.items()})


@pytest.mark.thorough
def test_the_default_table_keeps_the_answers(llm: LLM, prompts: TokenPrompts) -> None:
    table = profile(llm.session, prompts, QUICK)
    assert (table.rule, table.entries) == (DepthRule(), {80: 4})
    assert right(llm, "bicache", depth=table.lookup) == right(llm, "none") >= 0.9 * COUNT


@pytest.mark.thorough
def test_the_papers_rule_is_one_layer_too_deep(llm: LLM, prompts: TokenPrompts) -> None:
    table = profile(llm.session, prompts, replace(QUICK, samples=2, rule=DepthRule(boundary="paper")))
    assert table.entries == {80: 5}
    assert table.curves[85][4] > 0.99
    assert table.curves[85][5] < 0.9
    assert right(llm, "bicache", depth=5) <= 0.1 * COUNT
    # States that have seen the question give the sixth layer other K and V than the store's.
    assert right(llm, "bicache", depth=5, boundary="recomputed") >= 0.9 * COUNT


@pytest.mark.thorough
def test_depth_0_is_no_cache(llm: LLM) -> None:
    assert right(llm, "bicache", depth=0) == right(llm, "none")


@pytest.mark.thorough
def test_a_mean_of_depths_may_be_a_depth_that_no_request_has(llm: LLM, prompts: TokenPrompts) -> None:
    """Canvases of several requests: where the prefix holds a question about the same plan, all layers agree."""
    mixed = replace(QUICK, ratios=(85,), samples=8, canvas=400)
    depths = {rule: profile(llm.session, prompts, replace(mixed, rule=rule)).entries[85] for rule in RULES}
    assert depths[DepthRule()] == 4
    assert depths[DepthRule(requests="mean-depth")] > 4
    assert right(llm, "bicache", depth=depths[DepthRule(requests="mean-depth")]) <= 0.1 * COUNT


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_safe_rule_is_a_layer_below(llm: LLM, prompts: TokenPrompts, rule: DepthRule) -> None:
    table = profile(llm.session, prompts, replace(QUICK, samples=2, rule=rule))
    assert table.entries == depth_entries(table.limits, table.tau)
    assert table.entries == {80: 4 if rule.boundary == "safe" else 5}
