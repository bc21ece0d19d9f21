"""GSM8K as a task with a shared system prompt."""

import json
import re
from pathlib import Path

import pytest

from remask.errors import ConfigError, UnknownNameError
from remask.tasks.transit import SEPARATOR, is_correct
from remask_lab.gsm8k import EXAMPLES, Gsm8kSettings, conversations, is_solved, keeps_format, make_questions


def test_every_question_has_a_number_for_an_answer() -> None:
    assert len(conversations()) == 200
    for item in make_questions(160, 4, 0):
        assert item.answer.replace(",", "").replace(".", "").lstrip("-").isdigit()
        assert is_correct(f"some steps\n{SEPARATOR} {item.answer}", item.answer)


def test_the_questions_are_those_that_models_are_not_trained_on() -> None:
    """The first ones of the test split, whose published lines are among the tests' data."""
    published = Path(__file__).parents[2] / "tests" / "data" / "gsm8k" / "test.jsonl"
    for line, (user, worked) in zip(published.read_text(encoding="utf-8").splitlines(), conversations(), strict=False):
        own = json.loads(line)
        assert user == {"role": "user", "content": own["question"]}
        assert worked == {"role": "assistant", "content": re.sub(r"<<.*?>>", "", own["answer"])}


def test_a_reference_is_a_right_answer_in_the_form_that_is_asked_for() -> None:
    for item in make_questions(160, 4, 0):
        assert is_correct(item.reference, item.answer)
        assert keeps_format(item.reference)


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


def test_fewer_examples_leave_the_questions_as_they_are() -> None:
    many = make_questions(30, 3, 1)
    for shots in (0, 3):
        few = make_questions(30, 3, 1, Gsm8kSettings(shots=shots).shots)
        assert [item.messages[1] for item in few] == [item.messages[1] for item in many]
        for short, long in zip(few, many, strict=True):
            own = short.messages[0]["content"]
            assert own.count("Question: ") == shots
            assert long.messages[0]["content"].startswith(own)
    with pytest.raises(ConfigError, match="shots"):
        Gsm8kSettings(shots=EXAMPLES + 1)


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


def test_settings_come_from_json() -> None:
    assert Gsm8kSettings.from_mapping({"shots": None}) == Gsm8kSettings()
    with pytest.raises(UnknownNameError, match=r"setting of the task gsm8k .*Did you mean 'shots'"):
        Gsm8kSettings.from_mapping({"shotsx": 1})
