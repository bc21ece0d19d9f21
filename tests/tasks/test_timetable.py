import pytest

from remask.errors import ConfigError
from remask.tasks.timetable import Timetable, is_correct, make_timetables, timetables


def test_a_list_wraps_at_the_hour() -> None:
    table = Timetable(7, 44)
    assert table.text == "bus every 7 minutes from 44 :"
    assert table.departures(6) == "44 51 58 5 12 19"
    assert Timetable(15, 0).departures(5) == "0 15 30 45 0"


@pytest.mark.parametrize(
    ("interval", "start", "text"),
    [(0, 1, "interval is 0"), (16, 1, "every 1 to 15"), (1, 60, "start is 60"), (1, -1, "0 to 59")],
)
def test_what_no_clock_shows_is_refused(interval: int, start: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Timetable(interval, start)


def test_one_wrong_departure_is_wrong() -> None:
    answer = Timetable(2, 56).departures(4)
    assert is_correct("56 58 0 2", answer)
    assert is_correct(" 56 58 0 2\n", answer)
    assert not any(is_correct(text, answer) for text in ("56 58 0", "56 58 0 3", "56 58 0 2 4", "56, 58, 0, 2", ""))


def test_evaluations_and_training_share_no_timetable() -> None:
    ours, theirs = timetables(held_out=True), timetables(held_out=False)
    assert (len(ours), len(theirs)) == (225, 675)
    assert not set(ours) & set(theirs)
    assert {table.interval for table in ours} == {table.interval for table in theirs} == set(range(1, 16))
    assert set(make_timetables(225, 3)) == set(ours)


def test_a_seed_fixes_a_workload() -> None:
    drawn = make_timetables(20, 1)
    assert drawn == make_timetables(20, 1)
    assert drawn != make_timetables(20, 2)
    assert len(set(drawn)) == 20


@pytest.mark.parametrize("count", [0, 226])
def test_more_timetables_than_are_held_out_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="225 timetables are held out"):
        make_timetables(count, 0)
