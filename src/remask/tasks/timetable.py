"""The timetable task: the minutes past the hour at which a bus leaves, each determined by the one before.

A prompt gives the interval and the first departure, and the response lists the departures until it is full::

    prompt     bus every 7 minutes from 44 :
    response   44 51 58 5 12 19 ...

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
"""Minutes of an hour, at which a list wraps."""

MAX_INTERVAL: Final = 15
"""The longest interval that a timetable has, in minutes."""


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
    def text(self) -> str:
        """The prompt."""
        return f"bus every {self.interval} minutes from {self.start} :"

    def departures(self, count: int) -> str:
        """The right response of `count` departures."""
        return " ".join(str((self.start + place * self.interval) % MINUTES) for place in range(count))


def is_correct(text: str, answer: str) -> bool:
    """Tells whether `text` is exactly `answer`, white space at both ends aside: one wrong departure makes it wrong."""
    return text.strip() == answer


def timetables(*, held_out: bool) -> list[Timetable]:
    """All timetables that models are asked for in evaluations, or all others, from which training draws its prompts."""
    every = [Timetable(interval, start) for interval in range(1, MAX_INTERVAL + 1) for start in range(MINUTES)]
    return [each for each in every if (each.start % 4 == each.interval % 4) == held_out]


def make_timetables(count: int, seed: int) -> list[Timetable]:
    """Draws `count` different timetables that training never asks for. The same arguments give the same list."""
    known = timetables(held_out=True)
    if not 1 <= count <= len(known):
        raise ConfigError(f"count is {count}; {len(known)} timetables are held out, so it lies between 1 and that.")
    return random.Random(seed).sample(known, count)
