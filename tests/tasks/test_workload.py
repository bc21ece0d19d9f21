"""What all tasks have in common: how a seed deals a workload out, and what is refused."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from remask.errors import ConfigError, UnknownNameError
from remask.tasks import relay, tariff, town, transit

BOTH = tariff.TariffSettings(kinds=("plan", "lookup"))
MAKE: dict[str, Callable[[int, int, int], list[Any]]] = {
    "relay": relay.make_workload,
    "tariff": tariff.make_workload,
    "tariff, both kinds": lambda requests, prompts, seed: tariff.make_workload(requests, prompts, seed, BOTH),
    "town": town.make_workload,
    "transit": transit.make_workload,
}
KINDS: dict[str, Callable[[Any], object]] = {
    "tariff, both kinds": lambda request: request.question.kind,
    "town": lambda request: request.kind,
    "transit": lambda request: request.question.hops,
}


@pytest.mark.parametrize("name", MAKE)
def test_no_question_is_asked_twice_before_all_of_its_kind(name: str) -> None:
    """And then all are asked again: of few questions about two prompts each is asked about equally often."""
    for requests, prompts in ((48, 4), (600, 2)):
        for seed in range(3):
            work = MAKE[name](requests, prompts, seed)
            kind = KINDS.get(name, lambda _: None)
            asked = Counter((number(each), kind(each), each.messages[-1]["content"]) for each in work)
            of_kind: dict[Any, list[int]] = {}
            for (prompt, own, _), count in asked.items():
                of_kind.setdefault((prompt, own), []).append(count)
            assert all(max(counts) - min(counts) <= 1 for counts in of_kind.values())
            assert requests > 48 or max(asked.values()) == 1


def number(request: Any) -> int:
    return int(request.page if isinstance(request, town.TownRequest) else request.prompt_index)


WORDS = (
    (*relay.SEASONS, *relay.TOWNS, *relay.GOODS),
    (*tariff.PLANS, *tariff.TITLES, *tariff.NAMES),
    transit.STOPS,
)


def test_names_are_distinct_and_most_are_single_words() -> None:
    for words in (*WORDS, town.SHOPS, town.STREETS):
        assert len(set(words)) == len(words)
    assert all(word.isalpha() and word.isascii() for words in WORDS for word in words)
    assert not set(transit.STOPS) & set(transit.RULES.split())


@pytest.mark.parametrize("name", MAKE)
def test_a_seed_fixes_a_workload_in_shuffled_order(name: str) -> None:
    first = MAKE[name](60, 3, 1)
    assert first == MAKE[name](60, 3, 1)
    assert first != MAKE[name](60, 3, 2)
    order = [number(request) for request in first]
    assert order not in (sorted(order), [place % 3 for place in range(60)])


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("requests", "prompts"), [(1, 1), (7, 3), (41, 4), (10, 10)])
def test_prompts_and_kinds_are_dealt_out_evenly(name: str, requests: int, prompts: int) -> None:
    workload = MAKE[name](requests, prompts, 4)
    prompts_of, kinds = Counter(map(number, workload)), Counter(map(KINDS.get(name, lambda _: 0), workload))
    assert len(workload) == requests
    assert set(prompts_of) == set(range(prompts))
    assert max(prompts_of.values()) - min(prompts_of.values()) <= 1
    assert max(kinds.values()) - min(kinds.values()) <= 1
    system = {number(request): request.messages[0] for request in workload}
    assert all(request.messages[0] == system[number(request)] for request in workload)
    assert len({each["content"] for each in system.values()}) == prompts


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("requests", "prompts", "message"), [(0, 1, "requests is 0"), (3, 4, "prompts is 4"), (3, 0, "prompts is 0")]
)
def test_sizes_that_cannot_be(name: str, requests: int, prompts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MAKE[name](requests, prompts, 0)


@pytest.mark.parametrize(
    "settings",
    [
        relay.RelaySettings,
        tariff.TariffSettings,
        transit.TransitSettings,
        town.TownSettings,
    ],
)
def test_settings_come_from_json_and_names_are_suggested(settings: Any) -> None:
    assert settings.from_mapping({each.name: None for each in fields(settings)}) == settings()
    name = fields(settings)[0].name
    with pytest.raises(UnknownNameError, match=f"setting of the task {settings.task} .*Did you mean '{name}'"):
        settings.from_mapping({f"{name}x": 1})


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (relay.RelaySettings, {"rows": 7}, "rows must be a whole number from 8 to 24, got 7"),
        (relay.RelaySettings, {"rows": 25}, "rows must be a whole number from 8 to 24, got 25"),
        (relay.RelaySettings, {"seasons": 3}, "seasons must be a whole number from 1 to 2, got 3"),
        (
            relay.RelaySettings,
            {"seasons": 1, "legs": 2},
            "legs is 2, and the legs of a route have seasons of their own",
        ),
        (tariff.TariffSettings, {"orders": 3}, "orders must be a whole number from 4 to 64, got 3"),
        (tariff.TariffSettings, {"orders": 65}, "orders must be a whole number from 4 to 64, got 65"),
        (
            tariff.TariffSettings,
            {"orders": 7},
            "with plans=2 a system prompt has at least 8. Raise orders or lower plans",
        ),
        (tariff.TariffSettings, {"asked": 5}, "asked must be a whole number from 1 to 4, got 5"),
        (tariff.TariffSettings, {"plans": 4}, "plans must be a whole number from 1 to 3, got 4"),
        (tariff.TariffSettings, {"kinds": []}, "kinds names no kind of question; it names one or more of plan, lookup"),
        (tariff.TariffSettings, {"kinds": "plan"}, "kinds must be a list"),
        (town.TownSettings, {"shops": 3}, "shops must be a whole number from 4"),
    ],
)
def test_bad_settings(settings: Any, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings.from_mapping(values)


@pytest.mark.parametrize(
    ("task", "words", "share", "left"),
    [(relay, relay.TOWNS, relay.right_hops, 5 / 6), (tariff, tariff.NAMES, tariff.right_names, 3 / 4)],
)
def test_one_wrong_word_makes_a_response_wrong(
    task: Any, words: tuple[str, ...], share: Callable[[str, str], float], left: float
) -> None:
    (request,) = task.make_workload(1, 1, 0)
    said = request.reference.split()
    said[3] = next(word for word in words if word not in said)
    wrong = " ".join(said)
    assert not task.is_correct(wrong, request.reference)
    assert share(wrong, request.reference) == pytest.approx(left)
    assert share(request.reference, request.reference) == 1
    assert share("", request.reference) == 0
