"""The tariff task: seeds fix it, every question has one right answer that follows from the texts and the price list."""

import json
import random
import re
from collections import Counter

import pytest

from remask.errors import ConfigError
from remask.tasks import tariff
from remask.tasks.tariff import TariffSettings


def orders(text: str) -> list[tuple[str, str]]:
    """The orders, read from the text of the system prompt as a person would."""
    return [tuple(order.split()) for order in text.removeprefix("Orders: ").removesuffix(".").split("; ")]  # type: ignore[misc]


def answer(system: str, user: str) -> str:
    """The right response, found by reading both messages."""
    asked = re.split(r", |\?", user.split(" ordered " if "ordered" in user else " pays ")[1])[:-1]
    plan = re.match(r"Plan (\w+):", user)
    found = []
    for item in asked:
        names = [n for t, n in orders(system) if (t if plan is None else str(tariff.price(plan[1], t))) == item]
        assert len(names) == 1, "one right answer"
        found += [item, names[0]]
    return " ".join(found)


def test_every_price_is_that_of_equally_many_titles() -> None:
    for plan in tariff.PLANS:
        counts = Counter(tariff.price(plan, title) for title in tariff.TITLES)
        assert counts == dict.fromkeys(range(1, tariff.PRICES + 1), len(tariff.TITLES) // tariff.PRICES)


def test_plans_differ_in_most_prices() -> None:
    for one, other in zip(tariff.PLANS, tariff.PLANS[1:], strict=False):
        same = sum(tariff.price(one, title) == tariff.price(other, title) for title in tariff.TITLES)
        assert same < len(tariff.TITLES) / 3


@pytest.mark.parametrize("plans", [1, 2, 3])
@pytest.mark.parametrize("count", [12, 40, 64])
def test_answers_follow_from_the_texts(plans: int, count: int) -> None:
    settings = TariffSettings(orders=count, plans=plans, kinds=("plan", "lookup"))
    for request in tariff.make_workload(60, 20, plans, settings):
        system, user = request.messages
        assert (system["role"], user["role"]) == ("system", "user")
        assert len(orders(system["content"])) == count
        assert request.reference == answer(system["content"], user["content"])
        assert tariff.is_correct(f" {request.reference}\n", request.reference)
        assert len(request.reference.split()) == 2 * settings.asked


def test_a_name_orders_once() -> None:
    prompt = tariff.draw_prompt(random.Random(0), TariffSettings(orders=64))
    assert {name for _, name in prompt.orders} == set(tariff.NAMES)


def test_one_system_prompt_is_asked_about_under_several_plans() -> None:
    requests = tariff.make_workload(40, 1, 0)
    assert len({request.messages[0]["content"] for request in requests}) == 1
    assert {request.question.plan for request in requests} == {plan for plan, _ in requests[0].prompt.prices}
    assert len(requests[0].prompt.prices) == TariffSettings().plans


def test_settings_come_from_json() -> None:
    text = '{"orders": 16, "asked": 2, "kinds": ["lookup", "plan"], "plans": 1}'
    settings = TariffSettings.from_mapping(json.loads(text))
    assert settings == TariffSettings(16, 2, ("lookup", "plan"), 1)
    assert {len(request.question.items) for request in tariff.make_workload(6, 2, 0, settings)} == {2}


def test_what_has_no_single_answer_is_refused() -> None:
    prompt = tariff.TariffPrompt((("rope", "Anna"), ("rope", "Ben")), ())
    with pytest.raises(ConfigError, match="2 names fit 'who ordered rope'"):
        prompt.buyer("rope")
    with pytest.raises(ConfigError, match="no names fit 'who ordered lamp'"):
        prompt.buyer("lamp")
    with pytest.raises(ConfigError, match="kind is 'ride'"):
        tariff.draw_question(random.Random(0), prompt, "ride")
    full = tariff.draw_prompt(random.Random(0), tariff.TariffSettings())
    for kind, count in (("plan", 5), ("plan", 0), ("lookup", 99)):
        with pytest.raises(ConfigError, match=f"count is {count}; this question asks for 1 to"):
            tariff.draw_question(random.Random(0), full, kind, count)
