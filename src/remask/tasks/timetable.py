"""The timetable task: list the minutes past the hour at which a bus leaves. Each one follows from the one before.

A prompt gives the interval and the first departures, and the response goes on until it is full::

    prompt     bus every 4 minutes from 44 : 44 48 52 56
    response   0 4 8 12 16 20 ...

A clock has 60 minutes, so the list wraps. A program checks every departure; a guess of one is right with probability
1 / 60.

Every text is made of words separated by single spaces, so that a word-level tokenizer reproduces it exactly. All draws
come from a `random.Random`, so a seed fixes a workload.
"""

import random
from dataclasses import dataclass
from typing import Final

from remask.errors import ConfigError

MINUTES: Final = 60
"""Minutes of an hour, after which a list starts again from 0."""

MAX_INTERVAL: Final = 4
"""The longest interval that a timetable has, in minutes."""


HELD_OUT: Final = 100
"""Timetables that are not in the training prompts."""

GIVEN: Final = 4
"""Departures that a prompt shows."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """A bus that leaves at minute `start` of an hour and every `interval` minutes from then on."""

    interval: int
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.interval <= MAX_INTERVAL:
            raise ConfigError(f"interval is {self.interval}; a bus leaves every 1 to {MAX_INTERVAL} minutes.")
        if not 0 <= self.start < MINUTES:
            raise ConfigError(f"start is {self.start}; the minutes of an hour go from 0 to {MINUTES - 1}.")

    @property
    def rule(self) -> str:
        """The start of a prompt, which gives the interval and the first minute."""
        return f"bus every {self.interval} minutes from {self.start} :"

    @property
    def text(self) -> str:
        """The prompt: the rule, and the first `GIVEN` departures."""
        return f"{self.rule} {self.departures(range(GIVEN))}"

    def response(self, count: int) -> str:
        """The right response of `count` departures."""
        return self.departures(range(GIVEN, GIVEN + count))

    def departures(self, places: range) -> str:
        """The departures at `places`, counted from 0."""
        return " ".join(str((self.start + place * self.interval) % MINUTES) for place in places)


def is_correct(text: str, answer: str) -> bool:
    """Returns whether `text` is `answer`, apart from white space at both ends. One wrong departure makes it wrong."""
    return text.strip() == answer


def timetables(*, held_out: bool) -> list[Timetable]:
    """Returns the timetables for evaluation (`held_out`), or all others, from which training draws its prompts."""
    every = [Timetable(interval, start) for interval in range(1, MAX_INTERVAL + 1) for start in range(MINUTES)]
    # By lot: a rule on the numbers could hold out every list that some departure stands on.
    random.Random(0).shuffle(every)
    return every[:HELD_OUT] if held_out else every[HELD_OUT:]


def make_timetables(count: int, seed: int) -> list[Timetable]:
    """Draws `count` held-out timetables. None repeats before all were drawn. The same arguments give the same list."""
    if count < 1:
        raise ConfigError(f"count is {count}; a workload has at least 1 timetable.")
    known = timetables(held_out=True)
    rng = random.Random(seed)
    drawn: list[Timetable] = []
    while len(drawn) < count:
        drawn += rng.sample(known, min(len(known), count - len(drawn)))
    return drawn
