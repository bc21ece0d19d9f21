"""What is said of questions before any is asked, and what follows from what was read."""

import math
import re
from typing import Any

import pytest

from remask.errors import ConfigError
from remask.request.questions import Decisions, Question

CHOICE: dict[str, Any] = {"instructions": "which ?", "criteria": ["a", "b"]}


def question(**fields: Any) -> Question:
    made: Question = Decisions("x", {"q": {**CHOICE, **fields}}).questions["q"]
    return made


def test_labels_are_tried_in_order() -> None:
    assert question().labellings == [("A", "B"), ("a", "b"), ("a", "b")]
    assert question(labels="letters").labellings == [("A", "B"), ("a", "b")]
    assert question(labels="names").labellings == [("a", "b")]
    assert question(labels=["x", "y"]).labellings == [("x", "y")]
    many = [str(n) for n in range(30)]
    assert question(criteria=many).labellings == [tuple(many)]
    assert question(type="score").labellings[0] == ("1", "2")
    assert question(type="yes_no", criteria=None).labellings[0] == ("yes", "no")
    numbers = question(type="number", criteria=None, min=8, max=12, step=2)
    assert numbers.names == ("8", "10", "12")
    assert numbers.labellings == [("8", "10", "12"), ("08", "10", "12")]
    assert question(type="number", criteria=None, min=-1, max=1).labellings == [("-1", "0", "1")]


def test_prompts_show_what_labels_do_not_say() -> None:
    asked = question(criteria={"a": "the first", "b": None})
    assert asked.prompt(("A", "B")) == "which ?\nA: a, the first\nB: b\nAnswer with one of A, B."
    assert asked.prompt(("a", "b")) == "which ?\na: the first\nAnswer with one of a, b."
    assert question(show_options=False).prompt(("A", "B")) == "which ?"
    numbers = question(type="number", criteria=None, min=1, max=3)
    assert numbers.prompt(("1", "2", "3")) == "which ?\nAnswer with a number from 1 to 3."
    letters = question(type="number", criteria=None, min=1, max=2, labels="letters")
    assert letters.prompt(("A", "B")) == "which ?\nA: 1\nB: 2\nAnswer with one of A, B."


def test_what_follows_from_log_probabilities() -> None:
    found = question().decided([math.log(0.2), math.log(0.1)], ("A", "B"), None)
    assert found.probabilities == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert found.label_mass == pytest.approx(0.3)
    assert found.entropy == pytest.approx(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3))
    assert (found.choice, found.value, found.mean) == ("a", None, None)
    level = question().decided([math.log(0.2), math.log(0.1)], ("A", "B"), [math.log(0.4), math.log(0.1)])
    assert level.probabilities == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    assert level.label_mass == pytest.approx(0.3)
    sure = question().decided([-9999.0, 0.0], ("A", "B"), None)
    assert sure.entropy == pytest.approx(0.0)
    assert (sure.label_mass, sure.choice) == (1.0, "b")
    number = question(type="number", criteria=None, min=1, max=3).decided([-1.0, -1.0, -9.0], ("1", "2", "3"), None)
    assert number.value == 1
    assert number.mean == pytest.approx(1.5, abs=1e-3)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"instructions": " "}, "instructions is empty"),
    ({"template": "none"}, "must hold {answer} once"),
    ({"template": "{answer} {answer}"}, "must hold {answer} once"),
    ({"criteria": ["a"]}, "two alternatives at least"),
    ({"criteria": ["a", "a"]}, "names must differ"),
    ({"labels": "digits"}, 'labels must be "auto"'),
    ({"labels": ["x", "x"]}, "labels holds a text twice"),
    ({"labels": "letters", "criteria": [str(n) for n in range(27)]}, "for 26 alternatives at most"),
    ({"min": 3}, "min, max and step are those of a number"),
    ({"type": "number", "criteria": None}, "which needs min and max"),
    ({"type": "number", "min": 1, "max": 3}, "criteria is not for a number"),
    ({"type": "number", "criteria": None, "min": 3, "max": 3}, "the former smaller"),
    ({"type": "number", "criteria": None, "min": 0, "max": 1000}, "make 1001 numbers"),
    ({"type": "score", "criteria": None}, "two alternatives at least for a score"),
    ({"type": "noul", "criteria": {"perhaps": "x"}}, "those of yes and no"),
    ({"type": "yes_no"}, "an object of those of yes and no"),
    ({"type": "yes_no", "criteria": {"yes": "x", "true": "y"}}, "those of yes and no"),
    ({"type": "maybe"}, "Unknown type 'maybe'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_questions_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^questions\.q: .*" + re.escape(message)):
        question(**fields)


def test_the_cost_of_tokenizing_grows_with_labels() -> None:
    few, many = (
        Decisions("x", {"q": {**CHOICE, "labels": "names", "criteria": list(names)}}) for names in ("ab", "abcdefgh")
    )
    assert few.chars * 3 < many.chars
    assert Decisions("x", {"p": CHOICE, "q": CHOICE}, together=True).chars > 2 * Decisions("x", {"q": CHOICE}).chars
