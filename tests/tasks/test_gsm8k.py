"""GSM8K as a task with a shared system prompt."""

import pytest

from remask.tasks.gsm8k import EXAMPLES, conversations, is_solved, keeps_format, make_questions
from remask.tasks.transit import SEPARATOR, is_correct


def test_every_question_has_a_number_for_an_answer() -> None:
    assert len(conversations()) == 200
    for item in make_questions(160, 4, 0):
        assert item.answer.replace(",", "").replace(".", "").lstrip("-").isdigit()
        assert is_correct(f"some steps\n{SEPARATOR} {item.answer}", item.answer)


def test_questions_are_dealt_out_over_prompts_whose_examples_are_never_asked() -> None:
    items = make_questions(400, 3, 1)
    systems = [item.messages[0]["content"] for item in items]
    assert len(set(systems)) == 3
    assert systems[:3] == systems[3:6]
    asked = {item.messages[1]["content"] for item in items}
    assert len(asked) == 200 - 3 * EXAMPLES
    for system in set(systems):
        assert system.count("Question: ") == EXAMPLES
        assert system.count(SEPARATOR) == EXAMPLES + 1
        assert not any(question in system for question in asked)


def test_the_same_seed_gives_the_same_questions() -> None:
    assert make_questions(10, 2, 5) == make_questions(10, 2, 5)
    assert make_questions(10, 2, 5) != make_questions(10, 2, 6)


@pytest.mark.parametrize(
    ("text", "solved", "kept"),
    [
        ("2 + 3 = 5\n## 5", True, True),
        ("so 1,234.\n## 1,234", False, True),
        ("the answer is 5", True, False),
        ("the answer is $5.", True, False),
        ("4\n## 5 apples", True, False),
        ("## 5", True, False),
        ("a ## b ## 5", True, False),
        ("five", False, False),
        ("a ##", False, False),
        ("-5 ## -5", False, True),
    ],
)
def test_what_is_solved_and_what_keeps_the_format(text: str, solved: bool, kept: bool) -> None:
    assert is_solved("5", text) is solved
    assert keeps_format(text) is kept


def test_thousands_may_be_separated() -> None:
    assert is_solved("1,234", "it is 1234")
    assert is_solved("1234", "it is 1,234.")
