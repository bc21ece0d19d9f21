"""Parts of a response that a request names: fixed ones, and holes."""

from collections.abc import Sequence
from dataclasses import dataclass

from remask.checks.fields import Nested, check, declare, documented
from remask.checks.values import LIST, POSITIONS, AnyOf, ListOf, Text, Whole
from remask.errors import ConfigError

MAX_PARTS = 4096
"""Most parts of a canvas."""


@documented
@dataclass(frozen=True, slots=True)
class MaskLength:
    """The length of a hole. Raises `ConfigError` when made, naming the field and what is allowed."""

    min: int = declare(0, Whole(0, POSITIONS), "Positions that hold no padding, at least.")
    max: int | None = declare(None, Whole(1, POSITIONS), "Positions of the hole.")

    def __post_init__(self) -> None:
        check(self, "canvas.mask.")
        if self.max is None:
            raise ConfigError('canvas.mask needs max, the positions of the hole, as in {"mask": {"max": 16}}')
        if self.min > self.max:
            raise ConfigError(f"canvas.mask: min={self.min} is more than max={self.max}; lower it")


@documented
@dataclass(frozen=True, slots=True)
class Part:
    """A part of a response: one of its fields is set. Raises `ConfigError` when made, naming the field."""

    text: str | None = declare(None, Text(POSITIONS, empty=True), "A text that stands there as it is.")
    token_ids: Sequence[int] | None = declare(
        None, ListOf(Whole(0, POSITIONS), "token ids", LIST), "Tokens that stand there as they are."
    )
    mask: MaskLength | int | None = declare(
        None,
        AnyOf((Whole(1, POSITIONS), Nested(MaskLength, "mask field"))),
        "A hole of so many tokens, or of `min` to `max` tokens.",
    )

    def __post_init__(self) -> None:
        check(self, "canvas.")
        given = [name for name in ("text", "token_ids", "mask") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a part of canvas needs exactly one of text, token_ids and mask; got {', '.join(given) or 'none'}"
            )
        length = self.mask
        if isinstance(length, int):
            object.__setattr__(self, "mask", MaskLength(length, length))
        elif length is not None and not isinstance(length, MaskLength):
            object.__setattr__(self, "mask", MaskLength(**length))
