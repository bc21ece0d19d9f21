from collections import Counter

import pytest

from remask.errors import ConfigError
from remask.tasks.timetable import HELD_OUT, MAX_INTERVAL, MINUTES, Timetable, is_correct, make_timetables, timetables


def test_a_list_wraps_at_the_hour() -> None:
    table = Timetable(4, 44)
    assert table.text == "bus every 4 minutes from 44 : 44 48 52 56"
    assert table.response(6) == "0 4 8 12 16 20"
    assert Timetable(3, 58).departures(range(1, 3)) == "1 4"


@pytest.mark.parametrize(
    ("interval", "start", "text"),
    [(0, 1, "interval is 0"), (5, 1, "every 1 to 4"), (1, 60, "start is 60"), (1, -1, "0 to 59")],
)
def test_what_no_timetable_has_is_refused(interval: int, start: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Timetable(interval, start)


def test_one_wrong_departure_is_wrong() -> None:
    answer = Timetable(2, 48).response(4)
    assert is_correct("56 58 0 2", answer)
    assert is_correct(" 56 58 0 2\n", answer)
    assert not any(is_correct(text, answer) for text in ("56 58 0", "56 58 0 3", "56 58 0 2 4", "56, 58, 0, 2", ""))


def test_evaluations_and_training_share_no_timetable() -> None:
    ours, theirs = set(timetables(held_out=True)), set(timetables(held_out=False))
    assert (len(ours), len(ours) + len(theirs)) == (HELD_OUT, MAX_INTERVAL * MINUTES)
    assert not ours & theirs
    steps = {
        (table.interval, (table.start + place * table.interval) % MINUTES) for table in theirs for place in range(60)
    }
    assert len(steps) == MAX_INTERVAL * MINUTES, "training shows every single addition"


def test_a_seed_fixes_a_workload_and_repeats_come_last() -> None:
    drawn = make_timetables(2 * HELD_OUT + 5, 1)
    assert drawn == make_timetables(2 * HELD_OUT + 5, 1)
    assert drawn[:50] != make_timetables(50, 2)
    assert set(drawn[:HELD_OUT]) == set(timetables(held_out=True))
    assert sorted(Counter(drawn).values()) == [2] * (HELD_OUT - 5) + [3] * 5


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match="count is 0"):
        make_timetables(0, 0)
