"""What a measurement comes to: words, numbers and pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from remask_lab.records.record import Record


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished measurement.

    Attributes:
        text: tables and facts, for people.
        record: what goes into the result file.
        draw: draws the pictures into a folder, which it makes if it is not there, and returns their paths. None of a
            subject without pictures.
        reading: what the numbers show, in words; it goes into the result file too. Empty where the text says all.
        page: returns the outcome as an HTML page. None of a subject without one.
    """

    text: str
    record: Record
    draw: Callable[[str], list[Path]] | None
    reading: str = ""
    page: Callable[[], str] | None = None
