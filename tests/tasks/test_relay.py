"""The relay task: seeds fix it, and every question has one route that follows from the texts and the shippers."""

import random
import re
from collections import Counter

import pytest

from remask.errors import ConfigError
from remask.tasks import relay
from remask.tasks.relay import HOPS, LEG, RelayPrompt, RelayQuestion, RelaySettings


def rows(text: str) -> list[tuple[str, str]]:
    """The rows, read from the text of the system prompt as a person would."""
    return [tuple(row.split()) for row in text.removeprefix("Goods: ").removesuffix(".").split("; ")]  # type: ignore[misc]


def answer(system: str, user: str) -> str:
    """The right response, found by reading both messages."""
    asked = re.fullmatch(r"In (\w+)(?:, (\w+))?: route from (\w+)\?", user)
    assert asked is not None
    first, then, town = asked.groups()
    towns = []
    for hop in range(HOPS):
        season = then if then and hop >= LEG else first
        (town,) = [to for good, to in rows(system) if relay.shipper(season, good) == town]
        towns.append(town)
    return " ".join(towns)


def test_every_town_ships_equally_many_goods_in_every_season() -> None:
    for season in relay.SEASONS:
        counts = Counter(relay.shipper(season, good) for good in relay.GOODS)
        assert counts == dict.fromkeys(relay.TOWNS, len(relay.GOODS) // len(relay.TOWNS))


def test_seasons_differ_in_most_shippers() -> None:
    for one, other in zip(relay.SEASONS, relay.SEASONS[1:], strict=False):
        same = sum(relay.shipper(one, good) == relay.shipper(other, good) for good in relay.GOODS)
        assert same < len(relay.GOODS) / 5


@pytest.mark.parametrize("seasons", [1, 2])
@pytest.mark.parametrize("count", [8, 15, 24])
def test_routes_follow_from_the_texts(seasons: int, count: int) -> None:
    settings = RelaySettings(rows=count, seasons=seasons)
    for request in relay.make_workload(60, 20, seasons, settings):
        system, user = request.messages
        assert (system["role"], user["role"]) == ("system", "user")
        assert len(rows(system["content"])) == count
        assert request.reference == answer(system["content"], user["content"])
        assert len({request.question.start, *request.reference.split()}) == HOPS + 1
        assert relay.is_correct(f" {request.reference}\n", request.reference)


def test_a_second_leg_is_in_the_other_season() -> None:
    for request in relay.make_workload(40, 20, 0, RelaySettings(legs=2)):
        system, user = request.messages
        assert request.reference == answer(system["content"], user["content"])
        alone = relay.reference_response(request.prompt, RelayQuestion(request.question.season, request.question.start))
        assert request.reference.split()[:LEG] == alone.split()[:LEG]
        assert request.question.second_season not in (None, request.question.season)


def test_the_season_changes_the_route() -> None:
    """So nobody who has not read the question can know where a hop leads."""
    for request in relay.make_workload(20, 20, 0):
        one, other = (request.prompt.hops(season) for season, _ in request.prompt.starts)
        assert set(one) == set(other) == set(relay.TOWNS)
        assert sum(one[town] == other[town] for town in one) < len(one) / 2


def test_one_system_prompt_is_asked_about_in_several_seasons_from_many_towns() -> None:
    requests = relay.make_workload(200, 1, 0)
    assert len({request.messages[0]["content"] for request in requests}) == 1
    asked = {(request.question.season, request.question.start) for request in requests}
    assert {season for season, _ in asked} == {season for season, _ in requests[0].prompt.starts}
    assert len(requests[0].prompt.starts) == 2
    for season, starts in requests[0].prompt.starts:
        assert len(starts) >= 12
        assert {start for which, start in asked if which == season} == set(starts)


def test_what_has_no_single_answer_is_refused() -> None:
    lima, other = (good for good in relay.GOODS if relay.shipper("winter", good) == "Lima"), "Oslo"
    one, two, _ = lima
    with pytest.raises(ConfigError, match="Lima ships several goods in winter"):
        RelayPrompt(((one, other), (two, other)), ()).hops("winter")
    with pytest.raises(ConfigError, match="Oslo ships none of these goods in winter"):
        relay.route(RelayPrompt(((one, other),), ()), RelayQuestion("winter", "Lima"))


def test_prompts_vary() -> None:
    rng = random.Random(0)
    prompts = [relay.draw_prompt(rng, RelaySettings()) for _ in range(50)]
    assert len({frozenset(good for good, _ in prompt.rows) for prompt in prompts}) > 40
    assert {season for prompt in prompts for season, _ in prompt.starts} == set(relay.SEASONS)
