"""A pass that was launched, and is still to be read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from remask.engine.isolation import Ran, Scored
from remask.engine.running import RunningRequest, Scores


@dataclass(slots=True)
class Flight:
    """A pass, or the parts that were run of one that failed.

    Attributes:
        parts: what was run, with what it predicted.
        failed: requests that could not run, and why: of requests as they were to be, which may not come to be.
        trouble: what no request is to blame for, and is raised once the pass is read.
    """

    parts: list[tuple[Ran, list[Scored]]] = field(default_factory=list)
    failed: dict[RunningRequest, Exception] = field(default_factory=dict)
    trouble: Exception | None = None
    _kept: dict[RunningRequest, NDArray[np.bool_]] = field(default_factory=dict)

    @property
    def requests(self) -> list[RunningRequest]:
        """The requests that it runs, as they were when it was launched."""
        return [running for ran, _ in self.parts for running in ran.batch.requests]

    @property
    def passes(self) -> bool:
        """Whether it runs passes beside those of requests."""
        return any(ran.batch.passes for ran, _ in self.parts)

    @property
    def queued(self) -> list[RunningRequest]:
        """Requests as they were to be, those that failed included."""
        return [running for running in (*self.requests, *self.failed) if running.origin is not None]

    def keep(self, ahead: RunningRequest) -> None:
        """Note that a request has come to be what it was to be. Some of what was predicted is final meanwhile."""
        assert ahead.origin is not None
        self._kept[ahead] = ahead.origin.branches[0].canvas.noisy[ahead.plan.predicted]

    def taking_part(self) -> list[RunningRequest]:
        """The requests as they are now, without those that have ended, or did not come to be what they were to be."""
        came = [running for running in self.requests if running.origin is None or running in self._kept]
        return [running for running in (each.origin or each for each in came) if not running.released]

    def read(self) -> Iterator[tuple[Ran, list[tuple[RunningRequest, Scores]]]]:
        """Each part with the numbers of the requests that still take part. Waits for the device."""
        for ran, scored in self.parts:
            read = [self._own(running, scores) for each in scored for running, scores in each.read()]
            yield ran, [own for own in read if own is not None]

    def _own(self, running: RunningRequest, scores: Scores) -> tuple[RunningRequest, Scores] | None:
        """The request as it is now, and the numbers of what is still noisy; None where it takes no part any more."""
        if running.origin is None:
            return None if running.released else (running, scores)
        kept = self._kept.get(running)
        if kept is None or running.origin.released:
            return None
        tokens, confidence, more, chosen = scores
        own = Scores(tokens[kept], confidence[kept], more[:, kept], None if chosen is None else chosen[kept])
        return running.origin, own
