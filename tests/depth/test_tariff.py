"""The depth that the default rule picks keeps the answers right where the paper's rule is one layer too deep."""

from dataclasses import replace
from pathlib import Path

import pytest

from remask.depth.conversations import TokenPrompts
from remask.depth.profile import profile
from remask.depth.rule import DepthRule, ProfileSettings, depth_entries
from remask.depth.table import DepthTable
from remask.llm import LLM
from remask_lab.instruments.depths import RULES
from tests.goldens import tariff

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


def test_the_default_table_keeps_the_answers(llm: LLM, prompts: TokenPrompts, tmp_path: Path) -> None:
    table = profile(llm.session, prompts, QUICK)
    assert (table.rule, table.entries) == (DepthRule(), {80: 4})
    table.save(tmp_path / "table.json")
    reading = tariff.open_model(tmp_path / "table.json")
    assert right(reading, "bicache") == right(reading, "none") >= 0.9 * COUNT


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
    table: DepthTable = profile(llm.session, prompts, replace(QUICK, samples=2, rule=rule))
    assert table.entries == depth_entries(table.limits, table.tau)
    assert table.entries == {80: 4 if rule.boundary == "safe" else 5}
