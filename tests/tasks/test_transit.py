"""The transit task: seeds fix it, answers follow the table, and only an exact answer counts."""

import itertools
import random

import pytest

from remask.errors import ConfigError
from remask.tasks import transit
from remask.tasks.workload import messages


def walk(table_text: str, start: str, hops: int) -> str:
    """Follows the table by reading the text of the system prompt, as a rider would."""
    table = dict(row.strip().split(" > ") for row in table_text.split("table :")[1].split(";") if row.strip())
    for _ in range(hops):
        start = table[start]
    return start


@pytest.mark.parametrize("rows", [transit.MAX_HOPS + 1, 40, transit.DEFAULT_ROWS, len(transit.STOPS)])
def test_prompt_is_one_loop(rows: int) -> None:
    prompt = transit.draw_prompt(random.Random(3), rows)
    assert len(prompt.rows) == rows
    stop = prompt.rows[0][0]
    seen = []
    for _ in range(rows):
        seen.append(stop)
        stop = dict(prompt.rows)[stop]
    assert len(set(seen)) == rows
    assert stop == seen[0]


def test_rows_are_shuffled() -> None:
    rows = transit.draw_prompt(random.Random(0)).rows
    consecutive = sum(first[1] == second[0] for first, second in itertools.pairwise(rows))
    assert consecutive < len(rows) // 4


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_answer_follows_the_text_of_the_prompt(hops: int) -> None:
    rng = random.Random(hops)
    for _ in range(50):
        prompt = transit.draw_prompt(rng, rng.choice([4, 24, 56]))
        question = transit.draw_question(rng, prompt, hops)
        system, user = messages(prompt, question)
        assert (system["role"], user["role"]) == ("system", "user")
        _, start, _, asked, *_ = user["content"].split()
        answer = walk(system["content"], start, int(asked))
        response = transit.reference_response(prompt, question)
        assert transit.is_correct(response, answer)
        assert len(response.split()) == 2 * hops + 3
        assert answer != start


def test_answer_depends_on_the_prompt() -> None:
    rng = random.Random(0)
    answers = set()
    for _ in range(30):
        prompt = transit.draw_prompt(rng, len(transit.STOPS))
        answers.add(transit.route(prompt, transit.TransitQuestion("oak", 1))[-1])
    assert len(answers) > 15


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("elm > oak ## oak", True),
        ("## oak", True),
        ("##oak", True),
        ("elm > oak ## \t oak \n", True),
        ("elm > ash ## ash ## oak", True),
        ("elm > oak ## oak ## ash", False),
        ("elm > oak ## oak ##", False),
        ("### oak", True),
        ("## # oak", False),
        ("elm > oak # oak", False),
        ("elm > oak", False),
        ("oak", False),
        ("", False),
        ("##", False),
        ("## Oak", False),
        ("## OAK", False),
        ("## oak .", False),
        ("## oak oak", False),
        ("## oaken", False),
        ("## o ak", False),
    ],
)
def test_strict_match(text: str, right: bool) -> None:
    assert transit.is_correct(text, "oak") is right


@pytest.mark.parametrize("rows", [-1, 0, transit.MAX_HOPS, len(transit.STOPS) + 1])
def test_impossible_number_of_rows(rows: int) -> None:
    with pytest.raises(ConfigError, match=f"rows is {rows}"):
        transit.draw_prompt(random.Random(0), rows)


@pytest.mark.parametrize("hops", [0, -1, transit.MAX_HOPS + 1])
def test_impossible_number_of_hops(hops: int) -> None:
    prompt = transit.draw_prompt(random.Random(0))
    with pytest.raises(ConfigError, match=f"hops is {hops}"):
        transit.draw_question(random.Random(0), prompt, hops)


def test_unknown_start() -> None:
    prompt = transit.draw_prompt(random.Random(0))
    with pytest.raises(ConfigError, match="nowhere"):
        transit.route(prompt, transit.TransitQuestion("nowhere", 1))


def test_parts_of_a_response_are_judged_apart() -> None:
    item = transit.make_workload(1, 1, 0)[0]
    ride = item.reference.split(" ## ")[0]
    for text, rides, kept in (
        (item.reference, True, True),
        (ride, True, False),
        (f"{ride} ## {item.answer} {item.answer}", True, False),
        (f"{ride} ## {item.answer} ## {item.answer}", True, False),
        (f"elm > elm ## {item.answer}", False, True),
        (f"## {item.answer}", False, False),
        ("", False, False),
    ):
        assert transit.is_ride(item.prompt, item.question, text) is rides, text
        assert transit.keeps_format(text) is kept, text
