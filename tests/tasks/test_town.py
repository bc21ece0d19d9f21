"""The town task: seeds fix it, answers follow from the page, and only they are right."""

import json
import re

import pytest

from remask.tasks import town
from remask.tasks.town import Shop, TownRequest, TownSettings

SENTENCES = re.compile(
    r"The ([\w ]+) is in (\w+ Street)\. It opens at (\d+) and closes at (\d+), and it is shut on (\w+)\."
)


def shops(page: str) -> list[Shop]:
    """The shops, read from the page as a person would."""
    assert page.startswith("Answer from this page. ")
    return [
        Shop(name, street, int(opens), int(closes), shut)
        for name, street, opens, closes, shut in SENTENCES.findall(page)
    ]


def answer(item: TownRequest) -> str:
    """The right response, found by reading the page and the question."""
    every, question = shops(item.system), item.question
    if found := re.fullmatch(r"What is shut on (\w+)\?", question):
        return f"Shut on {found[1]}: {', '.join(f'the {each.name}' for each in every if each.shut == found[1])}."
    if found := re.fullmatch(r"What does the page say of the ([\w ]+)\? Give JSON\.", question):
        (shop,) = [each for each in every if each.name == found[1]]
        record = {"street": shop.street, "opens": shop.opens, "closes": shop.closes, "shut": shop.shut}
        return json.dumps(record)
    if found := re.fullmatch(r"What is in (\w+ Street)\?", question):
        (shop,) = [each for each in every if each.street == found[1]]
        return f"The {shop.name} is in {shop.street}."
    named = re.search(r"the shop in (\w+ Street)|the ([\w ]+?)(?= open| close| shut|\?)", question)
    assert named is not None
    (shop,) = [each for each in every if named[1] == each.street or named[2] == each.name]
    told = {
        "open": f"opens at {shop.opens}",
        "close": f"closes at {shop.closes}",
        "shut": f"is shut on {shop.shut}",
        "In which street": f"is in {shop.street}",
    }
    (says,) = [words for asked, words in told.items() if re.search(rf"\b{asked}\b", question.replace(named[0], ""))]
    return f"T{named[0][1:]} {says}."


@pytest.mark.parametrize("count", [4, 16, 40])
def test_answers_follow_from_the_page(count: int) -> None:
    for item in town.make_workload(120, 10, count, TownSettings(shops=count)):
        every = shops(item.system)
        assert len({each.name for each in every}) == len({each.street for each in every}) == count
        assert item.answer == answer(item)
        assert town.is_correct(item, item.answer)
        assert item.fact in item.answer


def test_a_shop_that_is_asked_for_by_its_street_is_not_named() -> None:
    for item in town.make_workload(200, 10, 3):
        if item.kind == "street":
            assert not any(each.name in item.question for each in shops(item.system))


def request(kind: str, asked: str) -> TownRequest:
    return TownRequest(0, "", kind, "", asked, asked)


@pytest.mark.parametrize(
    ("kind", "asked", "text", "right"),
    [
        ("find", "8", "The bakery opens at 8.", True),
        ("find", "8", "It opens at 8", True),
        ("find", "8", "The bakery opens at 18.", False),
        ("find", "8", "It opens at 8 or at 9.", False),
        ("find", "8", "", False),
        ("find", "Mill Street", "The bakery is in Mill Street.", True),
        ("find", "Mill Street", "The bakery is in Windmill Street.", False),
        ("street", "bakery", "The bakery is in Mill Street.", True),
        ("street", "bakery", "The bakeries is in Mill Street.", False),
        ("street", "Monday", "The shop in Mill Street is shut on Monday. \n", True),
        ("count", "the bank, the gym", "Shut on Monday: the bank, the gym.", True),
        ("count", "the bank, the gym", "Shut on Monday: the gym, the bank.", False),
        ("count", "the bank, the gym", "Shut on Monday: the bank.", False),
        ("record", '{"opens": 8}', '{ "opens": 8 }', True),
        ("record", '{"opens": 8}', '{"opens": 9}', False),
        ("record", '{"opens": 8}', '{"opens": 8', False),
        ("record", '{"opens": 8}', "[" * 100_000, False),
    ],
)
def test_only_what_was_asked_is_right(kind: str, asked: str, text: str, right: bool) -> None:
    assert town.is_correct(request(kind, asked), text) is right
