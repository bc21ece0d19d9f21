"""Overlap: the next pass is queued while one runs, if all plans in flight are known to repeat.

A queued pass has a speculative step of each request. Once the pass before it has been read, each step is committed, or
rolled back where its request has ended or gone on to another block.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from remask.core.select import Ranked
from remask.engine.faults import poisons
from remask.engine.isolation import Ran, Scored
from remask.engine.member import Member
from remask.engine.running import NO_SCORES, RunningRequest, Scores
from remask.sampling.decoder import Decoder

Read = list[tuple[Member, Scores]]
"""Members of a pass, with what was read of each."""


@dataclass(slots=True)
class InFlight:
    """A pass that was launched and is still to be read, or the parts that ran of one that failed.

    Attributes:
        steps: its speculative steps, each with its request. `commit` takes out those that were rolled back.
        parts: what ran, with what it predicted.
        failed: speculative steps that could not run, and why.
        trouble: what no request is to blame for, and is raised once the pass is read.
    """

    steps: dict[RunningRequest, RunningRequest] = field(default_factory=dict)
    parts: list[tuple[Ran, list[Scored]]] = field(default_factory=list)
    failed: dict[Member, Exception] = field(default_factory=dict)
    trouble: Exception | None = None
    _rolled_back: set[RunningRequest] = field(default_factory=set)
    _noisy: dict[RunningRequest, NDArray[np.bool_]] = field(default_factory=dict)  # of the predicted positions

    @property
    def passes(self) -> bool:
        """Whether it runs passes beside those of requests."""
        return any(ran.batch.passes for ran, _ in self.parts)

    def requests(self) -> list[RunningRequest]:
        """The requests that it still runs."""
        found = [self._request(member) for ran, _ in self.parts for member in ran.batch.requests]
        return [running for running in found if running is not None]

    def read(self) -> Iterator[tuple[Ran, Read]]:
        """Each part with the members that it still runs, and what was read of them. Waits for the device."""
        for ran, scored in self.parts:
            read: Read = [(work, NO_SCORES) for work in ran.batch.passes]
            for member, scores in (own for each in scored for own in each.read()):
                running = self._request(member)
                if running is not None:
                    noisy = self._noisy.get(member)
                    read.append((running, scores if noisy is None else scores.of(noisy)))
            yield ran, read

    def commit(self, step: RunningRequest) -> bool:
        """Make a speculative step the next one of its request, if it is. Otherwise roll it back."""
        running = self.steps[step]
        if running.released:  # so it has left the batch, and its ledger with it
            return False
        if running.closing or not running.repeats(step.decoder.step):
            self.roll_back(step)
            return False
        self._noisy[step] = running.branches[0].canvas.noisy[step.plan.predicted]
        running.take(step)
        return True

    def roll_back(self, step: RunningRequest) -> None:
        """Leave out a speculative step. The device token buffer needs nothing, as the step had nothing to choose."""
        step.branches[0].ledger.roll_back()
        self._rolled_back.add(step)

    def _request(self, member: RunningRequest) -> RunningRequest | None:
        running = self.steps.get(member, member)
        return None if running.released or member in self._rolled_back else running


@dataclass(slots=True)
class NextSteps:
    """The speculative steps of the requests in flight.

    Attributes:
        planned: the step of each request, and None for one that ends with the pass in flight.
        origins: the request of each step.
    """

    planned: dict[Member, RunningRequest | None] = field(default_factory=dict)
    origins: dict[RunningRequest, RunningRequest] = field(default_factory=dict)


def next_steps(flight: InFlight) -> NextSteps | None:
    """The speculative steps after `flight`.

    None where the pass must be read first, because a plan is not known to repeat.
    """
    if flight.passes:
        return None
    steps = NextSteps()
    for running in flight.requests():
        try:
            found = _next_step(running)
        # A policy may fail on a step that is never run. If it is run, the policy is asked again.
        except Exception as error:
            if poisons(error):
                raise
            return None
        if found is None:
            return None
        if found.decoder.finished:
            steps.planned[running] = None
        else:
            steps.planned[running] = found
            steps.origins[found] = running
    return steps


def _next_step(running: RunningRequest) -> RunningRequest | None:
    """The request in its next step, before what the pass in flight transfers is known; None: read that first.

    Where only the number of transferred positions is known, it predicts all that the pass in flight does.
    """
    known, decoder, canvas = running.transfers, running.decoder, running.branches[0].canvas
    if known is None or len(running.branches) > 1 or running.plan.fills or running.plan.hook is not None:
        return None
    block = decoder.block
    noisy = block.start + canvas.noisy[block.start : block.stop].nonzero()[0]
    final = noisy[:0]
    if not isinstance(known, Ranked):
        counted = final = known
    elif known.changes:  # what is final follows from step clocks
        counted = final = decoder.final(final)
    else:
        counted = noisy[: known.sure(len(noisy))]  # as many as these
    after = decoder.ahead(canvas.ahead(counted, decoder.step))
    if after.finished:
        return running.at(after)
    plan = running.repeated(after, canvas.ahead(final, decoder.step).noisy)
    if plan is None or (isinstance(known, Ranked) and known.changes and after.transfers is None):
        return None
    if isinstance(known, Ranked) and not known.changes and not known.counted(len(noisy)):
        done = _after_block(running, noisy)
        if not done.decoder.finished and not done.plan.spans.rewrites(plan.spans):
            return None
    return running.at(after, plan)


def _after_block(running: RunningRequest, noisy: NDArray[np.int64]) -> RunningRequest:
    """The request if the pass in flight transfers all that is `noisy` in the block."""
    step, branch = running.decoder.step, copy(running.branches[0])
    branch.canvas = branch.canvas.ahead(noisy, step)
    decoder: Decoder = running.decoder.ahead(branch.canvas)
    done = running.at(decoder)
    done.branches = (branch,)
    return done
