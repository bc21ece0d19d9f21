"""Overlap: the next pass is queued while one runs, if all its plans are known to repeat.

A queued pass has a speculative step of each request. Once the pass before it has been read, each step is committed, or
rolled back where its request has ended or gone on to another block.
"""

from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from remask.engine.faults import poisons
from remask.engine.isolation import LaunchedPass, Read, Scored
from remask.engine.member import Member
from remask.engine.running import RunningRequest
from remask.remasking.select import Ranked
from remask.sampling.decoder import Decoder


@dataclass(slots=True)
class QueuedPass(LaunchedPass):
    """A pass of speculative steps.

    Attributes:
        steps: the request of each speculative step.
        failed: the steps that could not run, with the error.
    """

    steps: dict[RunningRequest, RunningRequest] = field(default_factory=dict)
    failed: dict[Member, Exception] = field(default_factory=dict)
    _rolled_back: set[RunningRequest] = field(default_factory=set)
    _noisy: dict[RunningRequest, NDArray[np.bool_]] = field(default_factory=dict)  # of the predicted positions

    def _take(self, scored: Scored, read: Read) -> None:
        """See `LaunchedPass`: positions that the pass before has settled are skipped."""
        for step, scores in scored.read():
            running = self.running(step)
            if running is not None:
                noisy = self._noisy.get(step)
                read.append((running, scores if noisy is None else scores.of(noisy)))

    def running(self, member: RunningRequest) -> RunningRequest | None:
        """See `LaunchedPass`: the request of a step; None where it was rolled back."""
        running = self.steps.get(member, member)
        return None if running.released or member in self._rolled_back else running

    def commit(self, step: RunningRequest) -> bool:
        """Make a speculative step the next step of its request where they agree. Otherwise roll it back."""
        running = self.steps[step]
        if running.released:  # so it has left the batch, and its ledger with it
            return False
        if running.closing or running.decoder.step != step.decoder.step or not running.plan.again:
            self.roll_back(step)
            return False
        self._noisy[step] = running.branches[0].canvas.noisy[step.plan.predicted]
        predict = running.plan.predict
        running.revised([(branch, plan.predicting(predict)) for branch, plan in step.items()])
        return True

    def roll_back(self, step: RunningRequest) -> None:
        """Discard a speculative step. The token buffer is unchanged: nothing was left to choose in that block."""
        step.branches[0].ledger.roll_back()
        self._rolled_back.add(step)


@dataclass(slots=True)
class NextSteps:
    """The speculative steps of the requests of a running pass.

    Attributes:
        planned: the step of each request; None for a request that ends with the running pass.
        origins: the request of each step.
    """

    planned: dict[Member, RunningRequest | None] = field(default_factory=dict)
    origins: dict[RunningRequest, RunningRequest] = field(default_factory=dict)


def next_steps(launched: LaunchedPass) -> NextSteps | None:
    """The speculative steps after `launched`.

    None where the pass must be read first, because a plan is not known to repeat.
    """
    if launched.passes:
        return None
    steps = NextSteps()
    for running in launched.requests():
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
    """The request in its next step, before the transfers of the running pass are known; None: read that pass first.

    Where only the number of transfers is known, the step predicts all positions that the running pass predicts.
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
    """The request if the running pass transfers all `noisy` positions of the block."""
    step, branch = running.decoder.step, copy(running.branches[0])
    branch.canvas = branch.canvas.ahead(noisy, step)
    decoder: Decoder = running.decoder.ahead(branch.canvas)
    done = running.at(decoder)
    done.branches = (branch,)
    return done
