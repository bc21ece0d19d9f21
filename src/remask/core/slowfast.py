"""The knobs of SlowFast sampling, checked as they are made."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from remask.core.checks import real, whole
from remask.errors import ConfigError, UnknownNameError


@dataclass(frozen=True, slots=True)
class SlowFastKnobs:
    """How SlowFast sampling (arXiv 2506.10848) explores and when it accelerates.

    Attributes:
        slow_tokens: most confident positions transferred in a slow step.
        slow_steps: slow steps after which the span is taken as it is.
        min_confidence: the span ends at the last position at least this confident.
        window: slow steps over which the span's end must be stable.
        variance: of the end over the window, in positions squared; up to this it is stable.
        threshold: in a fast step every position of the span at least this confident is transferred.
    """

    slow_tokens: int = 1
    slow_steps: int = 8
    min_confidence: float = 0.1
    window: int = 2
    variance: float = 1.0
    threshold: float = 0.85

    def __post_init__(self) -> None:
        for name in ("slow_tokens", "slow_steps", "window"):
            whole(f"slowfast.{name}", getattr(self, name), low=1)
        for name in ("min_confidence", "threshold"):
            real(f"slowfast.{name}", getattr(self, name), low=0.0, high=1.0)
        real("slowfast.variance", self.variance, low=0.0)

    @classmethod
    def from_mapping(cls, values: object) -> "SlowFastKnobs":
        """Knobs from JSON-like values. Raises `ConfigError` on unknown names and on values of the wrong kind."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"slowfast must be an object of its knobs, got {values!r}")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise UnknownNameError("knob of slowfast", str(name), known)
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        return cls(**given)
