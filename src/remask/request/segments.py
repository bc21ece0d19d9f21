"""Segments: parts anywhere in a prompt that a request names to be stored and shared."""

from collections.abc import Sequence
from dataclasses import dataclass

from remask.checks.fields import check, declare
from remask.checks.values import POSITIONS, Whole
from remask.errors import ConfigError

MAX_SEGMENTS = 256
"""Most parts of a prompt."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive prompt tokens. Raises `ConfigError` when made, naming the field."""

    start: int | None = declare(None, Whole(0, POSITIONS), "Prompt tokens before the part.")
    length: int | None = declare(None, Whole(1, POSITIONS), "Tokens of the part.")

    def __post_init__(self) -> None:
        check(self, "segments.")
        for name in ("start", "length"):
            if getattr(self, name) is None:
                raise ConfigError(f'segments: a part needs {name}, as in {{"start": 12, "length": 64}}')

    @property
    def positions(self) -> range:
        """Its positions in the prompt."""
        assert self.start is not None
        assert self.length is not None
        return range(self.start, self.start + self.length)

    @property
    def content(self) -> dict[str, int]:
        """The part as JSON-like values."""
        return {"start": self.positions.start, "length": len(self.positions)}


def stored_parts(segments: Sequence[Segment], prompt: int) -> tuple[range, ...]:
    """The positions of parts in a prompt of `prompt` tokens, ascending.

    Raises `ConfigError` on parts that overlap or reach beyond the prompt.
    """
    parts = sorted((each.positions for each in segments), key=lambda part: (part.start, part.stop))
    end = 0
    for part in parts:
        told = f"segments: start={part.start} and length={len(part)}"
        if part.stop > prompt:
            raise ConfigError(
                f"{told} end at {part.stop}, and the prompt has {prompt} tokens; a part ends before the response"
            )
        if part.start < end:
            raise ConfigError(f"{told} overlap the part before, which ends at {end}; each token is of one part at most")
        end = part.stop
    return tuple(parts)
