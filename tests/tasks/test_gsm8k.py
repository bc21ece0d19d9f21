"""GSM8K as a task with a shared system prompt."""

from remask.tasks.gsm8k import EXAMPLES, conversations, make_questions
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
