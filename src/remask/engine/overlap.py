"""Overlap: the next pass is queued while one runs, if all its plans are known to repeat.

A queued pass has speculative turns. Once the pass before it has been read, each is confirmed, or rolled back where its
request has ended or gone on to another block.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from remask.denoising.select import RankRule
from remask.engine.lifecycle import PASS_FAILED, POLICY_FAILED, Lifecycle
from remask.engine.member import Member, Tally, Turn
from remask.engine.runner import LaunchedPass
from remask.engine.running import RunningRequest
from remask.machine.device import is_fatal
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan
from remask.sampling.decoder import Decoder

_FREE = Tally(0, 0)

Ahead: TypeAlias = dict[Member, Turn | None]
"""The next turn of each member in flight; None where it ends with the pass that runs."""


def plan_ahead(turns: Sequence[Turn]) -> Ahead | None:
    """Plan the turns that follow `turns`, which are in flight. None where these must be read first."""
    ahead: Ahead = {}
    for turn in turns:
        try:
            following = _following(turn)
        # A policy may fail on a step that is never run. If it is run, the policy is asked again.
        except Exception as error:
            if is_fatal(error):
                raise
            return None
        if following is None or following.decoder is None:
            return None
        ahead[turn.member] = None if following.decoder.finished else following
    return ahead


def roll_back(turn: Turn) -> None:
    """Discard a speculative turn. The token buffer is unchanged: nothing was left to choose in its block."""
    turn.items[0][0].ledger.roll_back()


def confirm(queued: LaunchedPass, lifecycle: Lifecycle) -> LaunchedPass | None:
    """Confirm the turns of a queued pass once the pass before is read; None: none is left. Raises its `batch_error`."""
    if queued.batch_error is not None:
        raise queued.batch_error
    for turn in queued.batch:
        if turn not in queued.speculative:
            continue
        member, confirmed = turn.member, False
        lifecycle.at_work = (member.id,)
        try:
            confirmed = _confirm(turn, queued)
        except Exception as error:
            lifecycle.fail(member, error, POLICY_FAILED)
        if not confirmed:
            lifecycle.stats.discarded_passes += 1
        elif turn.error is not None:
            lifecycle.fail(member, turn.error, PASS_FAILED)
    return queued if queued.turns() else None


def _confirm(turn: Turn, queued: LaunchedPass) -> bool:
    """Make a speculative turn the next one of its request where they agree. Otherwise roll it back."""
    running = turn.member
    if running.ended:  # so it has left the batch, and its ledger with it
        return False
    planned = running.plan()
    decoder, before = planned.decoder, turn.decoder
    if decoder is None or before is None or decoder.step != before.step or not planned.plan.again:
        roll_back(turn)
        return False
    ((state, plan),) = turn.items
    queued.speculative.remove(turn)
    queued.still_noisy[turn] = still_noisy = state.canvas.noisy[plan.predicted]
    if turn.hidden is not None:
        turn.hidden = turn.hidden[torch.from_numpy(still_noisy).to(turn.hidden.device)]
    if plan.spans is planned.plan.spans:
        turn.items, turn.tally = planned.items, planned.tally
    else:  # rows were chosen while it ran
        turn.revise([(state, plan.predicting(planned.plan.predict))])
    turn.decoder, turn.predicted = decoder, planned.predicted
    running.turn = turn
    return True


def _following(turn: Turn) -> Turn | None:
    """The turn of the next step, before the transfers of this one are known; None: read this one first.

    Where only the number of transfers is known, it predicts all positions that this turn predicts. It has no plan where
    the decoder has finished.
    """
    running, known, decoder, now = turn.member, turn.transfers, turn.decoder, turn.plan
    if not isinstance(running, RunningRequest) or known is None or decoder is None or len(running.canvases) > 1:
        return None
    if now.fills or now.hook is not None:
        return None
    state = running.canvases[0]
    canvas, block = state.canvas, decoder.block
    noisy = block.start + canvas.noisy[block.start : block.stop].nonzero()[0]
    final = noisy[:0]
    if not isinstance(known, RankRule):
        counted = final = known
    elif known.changes:  # what is final follows from step clocks
        counted = final = decoder.outcome(final).final
    else:
        counted = noisy[: known.sure(len(noisy))]  # as many as these
    after = _after(decoder, canvas.with_settled(counted, decoder.step))
    if after.finished:
        return Turn(running, (), _FREE, after, final)
    open_ = canvas.with_settled(final, decoder.step).noisy if len(final) else canvas.noisy
    plan = running.planner.repeated(after, open_)
    if plan is None or (isinstance(known, RankRule) and known.changes and after.transfers is None):
        return None
    if isinstance(known, RankRule) and not known.changes and not known.counted(len(noisy)):
        then = _after_block(running, decoder, noisy)
        if then is not None and not then.spans.rewrites(plan.spans):
            return None
    standing = running.planner.standing
    assert standing is not None
    assert standing.tally is not None
    return Turn(running, ((state, plan),), standing.tally, after, plan.predicted)


def _after(decoder: Decoder, canvas: Canvas) -> Decoder:
    """The decoder of the next step, if this one leaves `canvas`. This decoder stays as it is."""
    after = copy(decoder)
    after.canvas = canvas
    after.advance()
    return after


def _after_block(running: RunningRequest, decoder: Decoder, noisy: NDArray[np.int64]) -> Plan | None:
    """The plan of the request if this pass transfers all `noisy` positions of the block; None where it has finished."""
    state = copy(running.canvases[0])
    state.canvas = state.canvas.with_settled(noisy, decoder.step)
    after = _after(decoder, state.canvas)
    if after.finished:
        return None
    planner = replace(running.planner, passes=0, left_out=0)
    again = planner.repeated(after, state.canvas.noisy)
    return planner.plan([state], after)[0][1] if again is None else again
