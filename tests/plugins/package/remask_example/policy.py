"""`late-rows`: the prompt is computed every few steps, the response in every step."""

from dataclasses import dataclass

from remask.errors import ConfigError
from remask.plan import Plan, View
from remask.policies import CachePolicy


@dataclass(frozen=True, slots=True)
class LateRows(CachePolicy):
    """The prompt's K/V are computed every `every` steps and read from the cache in between.

    Attributes:
        every: steps from one full pass to the next, at least 1.
    """

    every: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every must be a whole number >= 1, got {self.every!r}")

    def plan(self, view: View) -> Plan:
        """All rows on a refresh. Otherwise the response, and the row before it, which may predict its first token."""
        refresh = view.step % self.every == 0
        spans = view.over(0 if refresh else view.prompt - 1, view.length)
        return Plan(spans, view.candidates, refreshes=refresh)
