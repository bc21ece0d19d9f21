"""Progress on stderr: a bar on a terminal, and elsewhere a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final, Self, TypeVar

from tqdm import tqdm

T = TypeVar("T")

EVERY_S: Final = 3.0  # seconds between two lines, and before the first one: what is done by then needs none
_BAR_AFTER_S: Final = 1.0  # a bar that is full at once tells nobody anything


class Progress:
    """How far something has come, as long as a `with` block runs. Nothing is told unless it is `shown`."""

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        *,
        shown: bool,
        scale: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what` comes to `total` of a `unit`, which is written as MB and such with `scale`."""
        terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(
            total=total, desc=what, unit=unit, unit_scale=scale, disable=not terminal, delay=_BAR_AFTER_S, leave=False
        )
        self._lines = shown and not terminal
        self._what, self._total, self._unit, self._scale, self._clock = what, total, unit, scale, clock
        self._began = self._told = clock()
        self._done, self._note = 0, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, each of which is one of the total."""
        with self:
            for item in items:
                yield item
                self.update()

    def update(self, count: int = 1, note: str = "") -> None:
        """`count` more are done; a `note` is what else there is to tell, until there is another."""
        self._done += count
        self._note = note or self._note
        self._bar.update(count)
        if not self._bar.disable and note:
            self._bar.set_postfix_str(note, refresh=False)
        if self._lines and self._done < self._total and self._clock() - self._told >= EVERY_S:
            self._told = self._clock()
            share = f"{100 * self._done // max(1, self._total)} %" if self._scale else f"{self._done} of {self._total}"
            unit = "" if self._scale else f" {self._unit}"
            notes = "".join(f", {part}" for part in (self._note, f"{self._told - self._began:.0f} s") if part)
            print(f"{self._what}: {share}{unit}{notes}", file=sys.stderr, flush=True)
