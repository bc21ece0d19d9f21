"""What `remask_lab thresholds` takes for right, and the table that it makes of parts."""

import pytest

from remask_lab.thresholds.measure import OpenQuestion, open_questions, repeats, table


def test_most_questions_of_the_list_have_an_answer() -> None:
    asked = open_questions()
    assert len({each.question for each in asked}) == 80
    assert sum(bool(each.accepted) for each in asked) == 68
    assert all(each.right(f"It is {word}.") for each in asked for word in each.accepted)
    assert not any(each.right("") for each in asked if each.accepted)


@pytest.mark.parametrize(
    ("accepted", "text", "right"),
    [
        (("eight", "8"), "A spider has EIGHT legs.", True),
        (("eight", "8"), "A spider has 18 legs, or eighty.", False),
        (("H2O",), "Water is H2O.", True),
        ((), "one two three four five six", True),
        ((), "The sea, the blue sea. The sea, the Blue sea!", False),
    ],
)
def test_accepted_words_stand_whole_and_free_texts_do_not_repeat(
    accepted: tuple[str, ...], text: str, right: bool
) -> None:
    assert OpenQuestion("?", accepted).right(text) is right
    assert repeats(text) is (not accepted and not right)


def test_parts_of_a_setting_are_one_line_beside_a_token_a_step() -> None:
    def row(threshold: float | None, part: str, right: list[bool], passes: int) -> dict[str, object]:
        point = {"threshold": threshold, "penalty": "none", "part": part}
        own = {"right": right, "clusters": [0, 1], "passes": passes, "tokens": 20, "cpu_seconds": 1.0, "seconds": 2.0}
        return {"point": point, "result": own}

    rows = [
        row(None, "0-1", [True, False], 20),
        row(0.9, "0-1", [True, True], 6),
        row(None, "2-3", [True, True], 20),
        row(0.9, "2-3", [True, False], 10),
        row(0.8, "0-1", [False, False], 4),
    ]
    _, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(rows).splitlines()]
    assert [line[:3] for line in lines] == [["-", "none", "4"], ["0.9", "none", "4"], ["0.8", "none", "2"]]
    assert [line[3].split()[0] for line in lines] == ["75.0", "75.0", "0.0"]
    assert [line[4].split(" ")[0] for line in lines] == ["-", "+0.0", "-50.0"]
    assert [line[5:] for line in lines[:2]] == [["10.0", "10.0", "0.50", "1.00"], ["4.0", "10.0", "0.50", "1.00"]]
