"""Overlap: the next pass is queued while one runs, if all its plans are known to repeat.

A queued pass has speculative turns. Once the pass before it has been read, each is confirmed, or rolled back where its
request has ended or gone on to another block.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.denoising.select import RankRule
from remask.engine.lifecycle import PASS_FAILED, POLICY_FAILED, Lifecycle
from remask.engine.member import Member, Tally, Turn
from remask.engine.runner import LaunchedPass
from remask.engine.running import RunningRequest
from remask.machine.device import is_fatal
from remask.machine.transfers import send
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan
from remask.sampling.decoder import Decoder

_NO_COST = Tally(0, 0)

NextTurns: TypeAlias = dict[Member, Turn | None]
"""The next turn of each member in flight; None if it ends with the pass that runs."""


def plan_ahead(turns: Sequence[Turn]) -> NextTurns | None:
    """Plan the turns that follow `turns`, which are in flight. Returns None if one of these must be read first."""
    next_turns: NextTurns = {}
    for turn in turns:
        try:
            next_turn = _plan_next(turn)
        # A policy may fail on a step that never runs. If the step does run, the policy is called again.
        except Exception as error:
            if is_fatal(error):
                raise
            return None
        if next_turn is None or next_turn.decoder is None:
            return None
        next_turns[turn.member] = None if next_turn.decoder.finished else next_turn
    return next_turns


def roll_back(turn: Turn) -> None:
    """Discard a speculative turn. The token buffer is unchanged: its block had no noisy position left to choose."""
    turn.items[0][0].ledger.roll_back()


def confirm(next_pass: LaunchedPass, lifecycle: Lifecycle) -> LaunchedPass | None:
    """Confirm or roll back the speculative turns of a queued pass, once the pass before it was read.

    Requests whose policy or turn has failed end. Returns None if no turn remains. Raises the pass's `batch_error`.
    """
    if next_pass.batch_error is not None:
        raise next_pass.batch_error
    for turn in next_pass.batch:
        if turn not in next_pass.speculative:
            continue
        member = turn.member
        lifecycle.active_ids = (member.id,)
        try:
            is_confirmed = _confirm_turn(turn, next_pass)
        except Exception as error:
            lifecycle.fail(member, error, POLICY_FAILED)
            is_confirmed = False
        if not is_confirmed:
            lifecycle.stats.discarded_passes += 1
        elif turn.error is not None:
            lifecycle.fail(member, turn.error, PASS_FAILED)
    return next_pass if next_pass.turns() else None


def _confirm_turn(turn: Turn, next_pass: LaunchedPass) -> bool:
    """Make a speculative turn the next one of its request if that is at the same step, or else roll it back.

    Returns whether it was confirmed. The predicted positions that are still noisy are added to `noisy_masks`.
    """
    running = turn.member
    if running.ended:  # its ledger is not used any more
        return False
    planned = running.plan()
    decoder, speculative_decoder = planned.decoder, turn.decoder
    is_same_step = decoder is not None and speculative_decoder is not None and decoder.step == speculative_decoder.step
    if not is_same_step or not planned.plan.again:
        roll_back(turn)
        return False
    ((state, plan),) = turn.items
    noisy = state.canvas.noisy[plan.predicted]
    next_pass.speculative.remove(turn)
    next_pass.noisy_masks[turn] = noisy
    if turn.hidden is not None:
        turn.hidden = turn.hidden[send(noisy.nonzero()[0], turn.hidden.device)]
    if plan.spans is planned.plan.spans:
        turn.items = planned.items
        turn.tally = planned.tally
    else:  # rows were chosen while it ran
        turn.revise([(state, plan.predicting(planned.plan.predict))])
    turn.decoder = decoder
    turn.predicted = planned.predicted
    running.turn = turn
    return True


def _plan_next(turn: Turn) -> Turn | None:
    """The turn that follows `turn`, planned before the transfers of `turn` are known.

    If only their number is known, the next turn predicts all positions that `turn` predicts. It has no items if the
    decoder has finished by then. Returns None if `turn` must be read first.
    """
    running, transfers, decoder = turn.member, turn.transfers, turn.decoder
    if not isinstance(running, RunningRequest) or transfers is None or decoder is None or len(running.canvases) > 1:
        return None
    if turn.plan.fills or turn.plan.hook is not None:
        return None
    state = running.canvases[0]
    canvas, block, step = state.canvas, decoder.block, decoder.step - running.planner.first_step
    noisy = block.start + canvas.noisy[block.start : block.stop].nonzero()[0]
    rule = transfers if isinstance(transfers, RankRule) else None
    final = noisy[:0]  # positions that are known to be final after this step
    if not isinstance(transfers, RankRule):
        final = transfers
    elif transfers.changes:  # what is final follows from step clocks
        final = decoder.outcome(final).final
    # Which positions a rule of fixed tokens transfers is not known, but how many: the decoder only counts them.
    settled = final if rule is None or rule.changes else noisy[: rule.min_count(len(noisy))]
    next_decoder = _advanced(decoder, canvas.with_settled(settled, step))
    if next_decoder.finished:
        return Turn(running, items=(), tally=_NO_COST, decoder=next_decoder, predicted=final)
    noisy_after = canvas.with_settled(final, step).noisy if len(final) else canvas.noisy
    plan = running.planner.repeat_plan(next_decoder, noisy_after)
    if plan is None or (rule is not None and rule.changes and next_decoder.transfers is None):
        return None
    if rule is not None and not rule.changes and not rule.has_fixed_count(len(noisy)):
        # The step may end the block. The pass after that must overwrite whatever the speculative one has written.
        other_plan = _plan_after_block(running, decoder, noisy)
        if other_plan is not None and not other_plan.spans.rewrites(plan.spans):
            return None
    repeating = running.planner.repeating
    assert repeating is not None
    assert repeating.tally is not None
    return Turn(running, ((state, plan),), repeating.tally, next_decoder, predicted=plan.predicted)


def _advanced(decoder: Decoder, canvas: Canvas) -> Decoder:
    """A copy of `decoder` at the next step, with `canvas` as this step leaves it."""
    result = copy(decoder)
    result.canvas = canvas
    result.advance()
    return result


def _plan_after_block(running: RunningRequest, decoder: Decoder, noisy: NDArray[np.int64]) -> Plan | None:
    """The request's next plan if this pass transfers all `noisy` positions of the block; None if the request ends."""
    state = copy(running.canvases[0])
    state.canvas = state.canvas.with_settled(noisy, decoder.step - running.planner.first_step)
    next_decoder = _advanced(decoder, state.canvas)
    if next_decoder.finished:
        return None
    planner = replace(running.planner, passes=0, skipped_fills=0)
    repeated = planner.repeat_plan(next_decoder, state.canvas.noisy)
    return planner.plan([state], next_decoder)[0][1] if repeated is None else repeated
