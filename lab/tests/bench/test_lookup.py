"""The look-up task: every question has one answer on its page, and answers of any form are judged."""

import re

import pytest

from remask.errors import ConfigError
from remask_lab.bench.lookup import (
    BY_HAND,
    LookupRequest,
    LookupSettings,
    Page,
    is_correct,
    make_workload,
    read_pages,
)

WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HAND = LookupSettings(written=BY_HAND)


def words(text: str) -> list[str]:
    """Its words, times and numbers, without what ends a sentence."""
    return [word.strip(".,;:?").lower() for word in text.split()]


def test_the_answer_to_a_drawn_question_stands_in_the_one_sentence_that_it_is_about() -> None:
    """Told by words alone: what question and page share besides the words of every sentence finds the sentence."""
    drawn = make_workload(300, 60, 5)
    assert len({request.page.topic for request in drawn}) == 3
    for request in drawn:
        _, *sentences = re.split(r"(?<=[.]) (?=[A-Z])", request.page.text)
        assert len(sentences) == LookupSettings().entries
        sentence_words: list[set[object]] = [set(words(sentence)) for sentence in sentences]
        question_words = set(words(request.question)) - set.intersection(*sentence_words)
        matches = [len(question_words & sentence) for sentence in sentence_words]
        assert matches.count(max(matches)) == 1, request.question
        assert set(words(request.value)) <= sentence_words[matches.index(max(matches))], request.question
        assert len(request.others) >= 1


def test_questions_by_hand_have_answers_on_their_pages() -> None:
    pages = read_pages()
    assert [len(questions) for questions in pages] == [4] * 25
    for request in (request for questions in pages for request in questions):
        page, value = set(words(request.page.text)), set(words(request.value))
        assert value <= page, request.question
        assert not value <= set(words(request.question)), request.question
        values = {value for values in request.page.values.values() for value in values} - set(WEEK)
        assert all(set(words(value)) <= page for value in values), request.page.text
        assert is_correct(request, f"It is {request.value}.")
        assert not any(is_correct(request, f"{request.value} or {other}") for other in request.others)
    assert make_workload(100, 25, 1, HAND) != make_workload(100, 25, 2, HAND)
    assert {id(request) for request in make_workload(100, 25, 1, HAND)} == {id(each) for own in pages for each in own}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The train leaves at 9:15.", True),
        ("It leaves at 9:15 and arrives at 11:05.", True),
        ("9:15 or 10:30", False),
        ("It leaves at 9.", False),
        ("It leaves at 19:15.", False),
        ("It leaves at 9:150.", False),
        ("It leaves.", False),
    ],
)
def test_an_answer_names_what_was_asked_and_no_other(text: str, right: bool) -> None:
    page = Page("timetable", "", {})
    assert is_correct(LookupRequest(page, "When?", "9:15", ("10:30", "9:05")), text) is right


def test_a_value_in_another_is_not_named() -> None:
    """Room 2 is not named by 12, nor Ann by Anna; capitals do not count."""
    page = Page("offices", "", {})
    assert is_correct(LookupRequest(page, "Which room?", "12", ("2",)), "Room 12")
    assert not is_correct(LookupRequest(page, "Who?", "Ann", ()), "Anna")
    assert is_correct(LookupRequest(page, "Who?", "Ann", ()), "ANN!")


@pytest.mark.parametrize(
    ("requests", "pages", "said"),
    [(101, 25, "100 questions about the first 25"), (5, 1, "4 questions about"), (26, 26, "there are 25 pages")],
)
def test_more_than_was_written_by_hand_is_refused(requests: int, pages: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_workload(requests, pages, 0, HAND)
    with pytest.raises(ConfigError, match="Unknown written 'typed'"):
        LookupSettings.from_mapping({"written": "typed"})
