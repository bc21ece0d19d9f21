"""The questions of `remask_lab decisions`, and what is computed of their answers."""

import random
from collections import Counter

import pytest

from remask_lab.decisions.measure import calibration_error, calibration_interval, halves
from remask_lab.decisions.questions import draw


def test_questions_have_their_answer_among_their_names() -> None:
    questions = draw(400, 59)
    kinds = Counter(item.question["type"] for item in questions)
    assert kinds == {"yes_no": 200, "choice": 200}
    answers = Counter(item.answer for item in questions if item.question["type"] == "yes_no")
    assert 80 <= answers["yes"] <= 120
    for item in questions:
        if item.question["type"] == "choice":
            assert item.answer in item.question["criteria"]
            assert 3 <= len(item.question["criteria"]) <= 6
    assert questions == draw(400, 59)
    first, second = halves(questions).values()
    assert len(first) + len(second) == 400
    assert not {item.state_number for item in first} & {item.state_number for item in second}


def test_truths_are_on_the_page() -> None:
    """Of pages: a yes repeats what the page says of a shop, and a no does not."""
    for each in draw(400, 7):
        if each.question["type"] == "yes_no" and each.question["instructions"].startswith(("Is the", "Does the")):
            words = each.question["instructions"].rstrip("?").split()
            name, said = " ".join(words[2:]).rsplit(" in ", 1) if " in " in " ".join(words) else ("", "")
            if name and name != "customer asking for money back":
                assert (f"The {name} is in {said}." in each.state) == (each.answer == "yes")


def test_calibration_error_of_what_is_known() -> None:
    assert calibration_error([0.75] * 4, [1, 1, 1, 0]) == 0
    assert calibration_error([1.0, 1.0], [0, 1]) == 0.5
    assert calibration_error([0.95, 0.55], [1, 0]) == pytest.approx((0.05 + 0.55) / 2)
    rng = random.Random(1)
    sure = [rng.random() for _ in range(400)]
    right = [float(rng.random() < share) for share in sure]
    low, high = calibration_interval(sure, right, [place // 8 for place in range(400)])
    assert 0 < low < high < 0.2
    assert calibration_error(sure, right) < high
