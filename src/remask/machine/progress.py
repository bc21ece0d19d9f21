"""Progress on stderr: a bar on a terminal, and elsewhere a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self, TypeVar

from tqdm import tqdm

T = TypeVar("T")

EVERY_S: Final = 3.0  # seconds between two lines, and before the first one
_BAR_AFTER_S: Final = 1.0  # seconds before a bar appears


class Progress:
    """The progress of a task during a `with` block, on stderr if `enabled`."""

    def __init__(
        self,
        task: str,
        total: int,
        unit: str,
        *,
        enabled: bool,
        scale: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For the task called `task`, of `total` units. With `scale`, units have prefixes, as in MB."""
        terminal = enabled and sys.stderr.isatty()
        self._bar = tqdm(
            total=total, desc=task, unit=unit, unit_scale=scale, disable=not terminal, delay=_BAR_AFTER_S, leave=False
        )
        self._lines = enabled and not terminal
        self._task = task
        self._total = total
        self._unit = unit
        self._scale = scale
        self._clock = clock
        self._start = self._last_line = clock()
        self._count = 0
        self._note = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over `items`, as one unit each."""
        with self:
            for item in items:
                yield item
                self.update()

    def update(self, count: int = 1, note: str = "") -> None:
        """Add `count` units. A `note` follows the progress until there is another one."""
        self._count += count
        self._note = note or self._note
        self._bar.update(count)
        if not self._bar.disable and note:
            self._bar.set_postfix_str(note, refresh=False)
        if self._lines and self._count < self._total and self._clock() - self._last_line >= EVERY_S:
            self._last_line = self._clock()
            share = (
                f"{100 * self._count // max(1, self._total)} %" if self._scale else f"{self._count} of {self._total}"
            )
            unit = "" if self._scale else f" {self._unit}"
            notes = "".join(f", {part}" for part in (self._note, f"{self._last_line - self._start:.0f} s") if part)
            print(f"{self._task}: {share}{unit}{notes}", file=sys.stderr, flush=True)
