from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lab.tests.similarity.tables import AUTHORS

from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies.bicache import DepthLookup
from remask_lab.similarity import profile as profiling
from remask_lab.similarity.conversations import Conversation, RandomPrompts
from remask_lab.similarity.probe import PrefixProbe
from remask_lab.similarity.profile import profile, table_distance
from remask_lab.similarity.prompts import default_prompts
from remask_lab.similarity.rule import DepthRule, ProfileSettings, depth_entries
from remask_lab.similarity.table import Growth
from tests import goldens
from tests.depth.models import open_model

QUICK = ProfileSettings(tau=0.5, ratios=(20, 60, 90), samples=3, canvas=100)


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return open_model("llada-tiny", dummy=True)


@pytest.fixture(scope="module")
def golden() -> LLM:
    return open_model(str(goldens.model_dir("llada")))


def test_distance_is_per_ratio() -> None:
    assert table_distance(DepthLookup({10: 1}), DepthLookup({10: 1, 50: 4}), (10, 50, 90, 95)) == 9 / 4


def test_golden_model_end_to_end(golden: LLM) -> None:
    table = profile(golden.session, default_prompts(golden.loaded), QUICK)
    assert table.rule == DepthRule()
    assert len(table.entries) > 1
    assert list(table.entries.values()) == sorted(set(table.entries.values()))
    assert table.entries == depth_entries(table.limits, 0.5)
    assert table.lookup == DepthLookup(table.entries)
    similarities = np.array(list(table.curves.values()))
    assert (np.diff(similarities[:, 1:], axis=0) > 0).all(), "a longer prefix is less disturbed"


def test_one_seed_one_table(golden: LLM) -> None:
    prompts = default_prompts(golden.loaded)
    first = profile(golden.session, prompts, QUICK)
    assert profile(golden.session, prompts, QUICK) == first
    other = ProfileSettings(tau=0.5, ratios=(20, 60, 90), samples=3, canvas=100, seed=1)
    assert profile(golden.session, prompts, other).curves != first.curves


def test_growing_keeps_earlier_requests(golden: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "FIRST_SAMPLES", 2)
    drawn: list[Conversation] = []
    draw = RandomPrompts.draw

    def record(self: RandomPrompts, *args: Any) -> Conversation:
        drawn.append(draw(self, *args))
        return drawn[-1]

    monkeypatch.setattr(RandomPrompts, "draw", record)
    prompts = default_prompts(golden.loaded)
    table = profile(golden.session, prompts, ProfileSettings(tau=0.5, ratios=(60,), samples=5, canvas=50))
    assert [step.samples for step in table.growth] == [4, 5]
    assert len(drawn) == table.samples == 5
    profile(golden.session, prompts, ProfileSettings(tau=0.5, ratios=(60,), samples=3, canvas=50))
    assert drawn[5:] == drawn[:3]


def test_growth_stops_when_the_table_stands_still(golden: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = iter([1, *[3] * 20])  # of one request after the other

    def similarity(self: PrefixProbe, *_: Any) -> Any:
        depth = next(depths)
        return np.tile([1.0] * depth + [0.0] * (6 - depth), (2, 1))

    monkeypatch.setattr(PrefixProbe, "similarity", similarity)
    monkeypatch.setattr(profiling, "FIRST_SAMPLES", 1)
    settings = ProfileSettings(
        tau=0.4, rule=DepthRule(requests="mean-depth", boundary="paper"), ratios=(60,), canvas=50
    )
    table = profile(golden.session, default_prompts(golden.loaded), settings)
    assert table.growth == (Growth(2, 1), Growth(4, 0), Growth(8, 0))
    assert table.samples == 8
    assert table.entries == {60: 2}, "2.75, floored"
    assert table.request_depths == {60: 2.75}


def test_growth_ends_at_the_most_samples(golden: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    number = iter(range(100))

    def similarity(self: PrefixProbe, *_: Any) -> Any:
        high = next(number).bit_length() % 2  # the mean swings from one doubling to the next
        return np.full((2, 6), float(high))

    monkeypatch.setattr(PrefixProbe, "similarity", similarity)
    monkeypatch.setattr(profiling, "FIRST_SAMPLES", 1)
    settings = ProfileSettings(tau=0.4, rule=AUTHORS, ratios=(60,), max_samples=12, canvas=50)
    table = profile(golden.session, default_prompts(golden.loaded), settings)
    assert table.growth == (Growth(2, 6), Growth(4, 6), Growth(8, 6), Growth(12, 0))
    assert table.samples == 12
    tolerant = ProfileSettings(tau=0.4, rule=AUTHORS, ratios=(60,), max_samples=12, canvas=50, tolerance=6)
    assert profile(golden.session, default_prompts(golden.loaded), tolerant).samples == 4


def canvases(llm: LLM, settings: ProfileSettings, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    seen: list[tuple[int, int, int]] = []

    def similarity(self: PrefixProbe, prompt: list[int], response: int, prefix: int, measure: str, _: Any) -> Any:
        seen.append((prefix, len(prompt), response))
        assert measure == ("official" if settings.official else "flat")
        return np.ones((2, llm.loaded.config.layers))

    monkeypatch.setattr(PrefixProbe, "similarity", similarity)
    profile(llm.session, default_prompts(llm.loaded), settings)
    return seen


def test_the_ratio_counts_the_masks(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = canvases(tiny, ProfileSettings(samples=1, canvas=400, response=32), monkeypatch)
    ratios = [round(100 * prefix / (prompt + masks)) for prefix, prompt, masks in seen]
    assert ratios == [*range(5, 100, 5), 97, 98], "of 99 % too little would be left"
    assert all(prompt + masks == 400 for _, prompt, masks in seen)
    assert [masks for _, _, masks in seen] == [32] * 16 + [30, 20, 10, 6, 4]


def test_the_official_ratio_has_no_masks(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = canvases(tiny, ProfileSettings(samples=1, official=True), monkeypatch)
    assert all(masks == 0 for _, _, masks in seen)
    assert {prompt for _, prompt, _ in seen} == {512}


@pytest.mark.parametrize(
    ("ends", "prefix", "canvas"),
    [((), 150, 200), ((60, 90, 120, 160), 120, 160), ((150,), 150, 200), ((74,), 150, 200), ((75,), 75, 100)],
)
def test_prefixes_end_with_turns_where_they_can(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...], prefix: int, canvas: int
) -> None:
    draw = RandomPrompts.draw
    monkeypatch.setattr(RandomPrompts, "draw", lambda *args: Conversation(draw(*args).tokens, ends))
    ((length, prompt, masks),) = canvases(tiny, ProfileSettings(samples=1, ratios=(75,), canvas=200), monkeypatch)
    assert (length, prompt + masks) == (prefix, canvas)


def test_official_similarities_differ(golden: LLM) -> None:
    prompts = default_prompts(golden.loaded)
    settings = ProfileSettings(ratios=(60,), samples=1, canvas=50, official=True)
    table = profile(golden.session, prompts, settings)
    assert table.definition == "official"
    flat = profile(golden.session, prompts, ProfileSettings(ratios=(60,), samples=1, canvas=50))
    assert flat.curves != table.curves
    joint = profile(golden.session, prompts, ProfileSettings(ratios=(60,), samples=1, canvas=50, joint=True))
    assert joint.definition == "joint"
    assert joint.curves not in (flat.curves, table.curves)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 0}, "tau must lie"),
        ({"tau": float("nan")}, "tau must lie"),
        ({"tolerance": -1}, "tolerance"),
        ({"official": True, "joint": True}, "two definitions of similarity"),
        ({"samples": 0}, "samples must be a whole number from 1"),
        ({"max_samples": 0}, "max_samples must be a whole number from 1"),
        ({"canvas": 1}, "canvas must be a whole number from 2"),
        ({"response": 0}, "response must be a whole number from 1"),
        ({"ratios": ()}, "ratios must be percents"),
        ({"ratios": (100,)}, "ratios must be percents"),
        ({"ratios": (-1,)}, "ratios must be percents"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProfileSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"canvas": 513}, "exceeds the model's 512"),
        ({"canvas": 10, "ratios": (33,)}, "cannot be cut at a prefix ratio of 33 %"),
        ({"canvas": 4}, "too short"),
    ],
)
def test_canvases_that_cannot_be(tiny: LLM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile(tiny.session, default_prompts(tiny.loaded), ProfileSettings(**settings))


@pytest.mark.parametrize("boundary", ["safe", "paper"])
@pytest.mark.parametrize("tau", [0.3, 0.5, 0.8, 0.97])
def test_layers_that_cannot_change_a_depth_are_left_out(
    golden: LLM, monkeypatch: pytest.MonkeyPatch, tau: float, boundary: Any
) -> None:
    """The depths are those of a profile of all layers, and at a higher tau too; less is computed."""
    computed: list[int] = []
    similarity = PrefixProbe.similarity

    def counted(self: PrefixProbe, *args: Any) -> Any:
        found = similarity(self, *args)
        computed.append(found.shape[1])
        return found

    monkeypatch.setattr(PrefixProbe, "similarity", counted)
    settings = ProfileSettings(
        tau=tau,
        rule=DepthRule(boundary=boundary),
        ratios=(20, 40, 60, 80, 90),
        samples=12,
        canvas=60,
        seed=int(tau * 100),
    )
    prompts, layers = default_prompts(golden.loaded), golden.loaded.config.layers
    whole = profile(golden.session, prompts, settings)
    assert sum(computed) == 12 * 5 * layers
    computed.clear()
    needed = profile(golden.session, prompts, replace(settings, needed_layers=True))
    assert sum(computed) < 12 * 5 * layers
    assert (needed.entries, needed.growth, needed.samples) == (whole.entries, whole.growth, whole.samples)
    for higher in (tau, (1 + tau) / 2, 0.999):
        assert depth_entries(needed.limits, higher) == depth_entries(whole.limits, higher)
    for ratio, limits in needed.limits.items():
        assert limits == pytest.approx(whole.limits[ratio][: len(limits)], abs=1e-6)


@pytest.mark.parametrize("rule", [AUTHORS, DepthRule(layers="largest"), DepthRule(requests="mean-depth")])
def test_other_rules_need_all_layers(rule: DepthRule) -> None:
    with pytest.raises(ConfigError, match=r"^needed_layers needs the rule 'leading, least-depth', got '.*leave one"):
        ProfileSettings(rule=rule, needed_layers=True)


@pytest.mark.parametrize(("name", "kind"), [("gidd-tiny", "uniform"), ("sdar-tiny", "block_causal")])
def test_only_masked_models_have_a_table(name: str, kind: str) -> None:
    llm = open_model(name, dummy=True)
    with pytest.raises(ConfigError, match=f"runs on masked models; '{name}' .* is {kind}"):
        profile(llm.session, default_prompts(llm.loaded), QUICK)


def test_profiling_leaves_the_engine_alone(tiny: LLM) -> None:
    before = tiny.engine.allocator.used
    profile(tiny.session, default_prompts(tiny.loaded), QUICK)
    assert tiny.engine.allocator.used == before
