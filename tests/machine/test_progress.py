"""What is told of progress, and when: the clock is the test's."""

import sys

import pytest

from remask.machine.progress import EVERY_S, Progress


def test_elsewhere_than_on_a_terminal_it_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    with Progress("answering", 4, "requests", enabled=True, clock=lambda: now) as bar:
        for seconds, done, note in ((1, 1, ""), (EVERY_S - 1, 0, "step 7"), (1, 1, ""), (EVERY_S, 1, ""), (9, 1, "")):
            now += seconds
            bar.update(done, note)
    assert capsys.readouterr().err.splitlines() == [
        "answering: 1 of 4 requests, step 7, 3 s",
        "answering: 3 of 4 requests, step 7, 7 s",
    ], "the end needs none: what comes of it is the news"


def test_bytes_are_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with Progress("loading weights", 3_000_000, "B", enabled=True, scale=True, clock=lambda: now) as bar:
        now += EVERY_S
        bar.update(1_000_000)
    assert capsys.readouterr().err == "loading weights: 33 %, 3 s\n"


def test_nothing_is_told_where_nobody_asks_or_it_is_done_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    late = iter(range(0, 900, int(EVERY_S)))
    for item in Progress("measuring", 3, "requests", enabled=False, clock=lambda: next(late)).track("abc"):
        assert item in "abc"
    with Progress("measuring", 3, "requests", enabled=True, clock=lambda: 0.0) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_it_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("remask.machine.progress._BAR_AFTER_S", 0.0)
    with Progress("answering", 2, "requests", enabled=True) as bar:
        bar.update(2, "step 1")
    told = capsys.readouterr().err
    assert "answering:" in told
    assert "\n" not in told, "it is drawn over itself"
