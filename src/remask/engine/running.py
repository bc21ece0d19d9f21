"""A running request: its turns in passes, what it writes to its canvas, and what it has cost so far."""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from remask.engine.canvas_state import CanvasState, Move
from remask.engine.member import CanvasPlans, EngineStats, Member, Reads, Scores, Tally, Turn
from remask.engine.placement import Claim
from remask.engine.planning import PassPlanner, ResponseEnd
from remask.engine.request import PendingRequest
from remask.errors import PlanError
from remask.model.config import ModelConfig
from remask.plan.pass_cost import LayerWork, layer_work
from remask.plan.plan import LastPass, Plan
from remask.plan.spans import rows_of
from remask.policies.base import CachePolicy
from remask.readers.base import Reader, ReadPass, Start, Written
from remask.readers.implied import readers_of
from remask.request.result import Event, FinishReason, Result, Transfer, Usage
from remask.sampling.decoder import Predicted


@dataclass(slots=True)
class RequestRecord:
    """What a request has done so far, for its result."""

    usage: Usage  # the work of its passes
    trace: list[Transfer] = field(default_factory=list)
    given: int = 0  # leading response tokens that were final from the start
    # Seconds from its arrival to the first final response token after the given ones
    first_settled: float | None = None
    reported: bool = False  # whether an event other than its start has been reported
    prefix: int = 0  # leading tokens that it shares with other requests, whether it reads them from the store or not


class RunningRequest(Member):
    """The `Member` of passes that denoises a canvas.

    Attributes:
        canvases: the conditional canvas and, under guidance, the unconditional one.
        claim: its pages and leases.
        closing: the result is reported, and one more pass completes a page for other requests.
    """

    def __init__(
        self,
        pending: PendingRequest,
        policy: CachePolicy,
        canvases: tuple[CanvasState, ...],
        claim: Claim,
        record: RequestRecord,
        shape: ModelConfig,
        before: "RunningRequest | None" = None,
    ) -> None:
        """`shape` is the model's configuration; `before` is the request before its canvas grew, if it has."""
        self.pending, self.request, self.policy = pending, pending.request, policy
        self.canvases, self.claim, self.record = canvases, claim, record
        self.id, self.owner = self.request.id, self.request.owner
        self.place = 1, self.request.adapter or "", canvases[0].sharing
        canvas, request = canvases[0].canvas, self.request
        self.decoder = pending.decoding.decoder(canvas, policy.traits.schedule.idle_passes)
        if before is not None:
            end, readers = before.end, before.readers
        else:
            record.given = canvas.settled_lead
            end = ResponseEnd(canvas, pending.response, pending.stops, formed=request.formed)
            start = Start(canvas, pending.response, pending.decoding.total_steps, shape, request.readers)
            readers = readers_of(start, self.decoder, policy, request.params)
        self.end: ResponseEnd = end  # looks for the end of the response
        self.readers: tuple[Reader, ...] = readers
        self.planner = PassPlanner(pending, policy, self.end, self.readers, pending.decoding.first_step)
        self.turn: Turn | None = None  # its next turn, once that is planned
        self.closing = self.done = self.ended = False
        self.ready = claim.lease is None or claim.lease.entry.ready
        self.cheapest: int | None = None
        readers = (*request.readers, *readers)
        self.foreseeable = policy.traits.by_clock and all(reader.foreseeable for reader in readers)

    def plan(self) -> Turn:
        if self.turn is not None:
            return self.turn
        planner, decoder = self.planner, self.decoder
        self.canvases[0].conditioned = decoder.context.conditioned
        again = None if self.closing else planner.repeated(decoder, self.canvases[0].canvas.noisy)
        if again is not None:
            items: CanvasPlans = ((self.canvases[0], again),)
        elif self.closing:
            # After a stop token the decoder stands at the next block, so the last one is where the settled blocks end.
            stop = 0 if self.claim.shares is None else self.claim.shares.ready()
            block = range(stop - self.pending.decoding.block, stop)
            items = planner.closing(self.canvases[0], decoder, block)
        else:
            items = planner.plan(self.canvases, decoder)
        standing = planner.standing
        tally = self.tally(items) if again is None or standing is None or standing.tally is None else standing.tally
        if standing is not None:
            standing.tally = tally
        self.turn = turn = Turn(self, items, tally, decoder, items[0][1].predicted)
        return turn

    def fit(self, turn: Turn, row_layers: int) -> None:
        """The pass is never cut."""

    def begin(self, turn: Turn) -> Move | None:
        first = turn.items[0][1]
        if first.fills and self.planner.passes > len(self.canvases[0].canvas):
            raise PlanError("a step has more fill passes than the canvas has positions, and would never end")
        if self.readers and len(first.predicted):
            step = self._read_pass(turn)
            for reader in self.readers:
                reader.admit(step)
        for state, plan in turn.items:
            if plan.again:  # it predicts a subset of what the last plan did
                state.ledger.enter(plan)
            else:
                state.enter(plan)
        move, self.claim.move = self.claim.move, None
        return move

    def tally(self, items: CanvasPlans) -> Tally:
        first, plan = items[0]
        live, prefix = plan.spans[-1].rows, first.prefix
        leased = prefix.length if self.claim.lease is not None and prefix is not None else 0
        return Tally(
            cost=sum(plan.cost for _, plan in items),
            rows=sum(plan.widest for _, plan in items),
            forwards=len(items) if self.policy.traits.schedule.own_clocks else 1,
            saved=sum(len(state.canvas) * plan.layers - plan.cost for state, plan in items),
            refreshes=any(plan.refreshes for _, plan in items),
            refreshes_prefix=bool(live[:leased].any()),
        )

    def reads(self, turn: Turn) -> Reads:
        if not len(turn.plan.predicted) or self.decoder.context.drafts:
            return ()
        step = self._read_pass(turn)
        parts = ((reader, reader.on_device(step)) for reader in self.readers)
        return tuple((reader, read) for reader, read in parts if read is not None)

    def write(self, turn: Turn, scores: Scores, stats: EngineStats) -> list[Event]:
        items, tally, planner, claim = turn.items, turn.tally, self.planner, self.claim
        plan, context = items[0][1], self.decoder.context
        stats.refreshes += tally.refreshes
        stats.prefix_refreshes += tally.refreshes_prefix
        stats.row_layers_saved += tally.saved
        if tally.forwards and (self.cheapest is None or tally.cost < self.cheapest):
            self.cheapest = tally.cost
        self.turn = None
        predictions = Predicted(plan.predicted, scores.tokens, scores.confidence)
        for reader, numbers in scores.shares:
            reader.choose(predictions, numbers)
        for reader, numbers in scores.shares:
            reader.read(predictions, numbers)
        if self.readers and not self.closing:
            step = self._read_pass(turn)
            for reader in self.readers:
                reader.ended(step, None if plan.fills else predictions)
        self.record.usage.forwards += tally.forwards
        self.record.usage.row_layers += tally.cost
        if claim.shares is not None and context.committed is None:
            claim.shares.computed(plan, claim.shares.ready())
        if self.closing:
            self.done = True
            return []
        if plan.fills:
            planner.passes += 1
            planner.left_out += len(self.canvases) > len(items)
            transfer = None
            if context.drafts and len(predictions.positions):
                self._put(predictions.positions, predictions.tokens)
                self.decoder.advance()
        else:
            columns = predictions.positions, predictions.tokens, predictions.confidence, predictions.measured
            planner.last_pass = LastPass(*columns)
            planner.paired += len(self.canvases) == 2 == len(items)
            planner.passes = planner.left_out = 0
            transfer = self._transfer(plan, predictions, scores.chosen)
            self.decoder.advance()
            committed = self.decoder.context.committed
            if claim.shares is not None and committed is not None:
                claim.shares.commit(committed)
        return self._report(transfer)

    def close(self) -> bool:
        """Whether one more pass, over the last block, completes a page for other requests; it runs next then."""
        shares = self.claim.shares
        if shares is None or self.closing or self.decoder.context.committed is not None:
            return False
        self.closing = shares.would_complete(shares.ready())
        self.done = not self.closing
        return self.closing

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        """The result. A cancelled or failed request has no tokens: a part of a canvas is not a response."""
        tokens: tuple[int, ...] = ()
        if reason in ("stop", "length") and all(reader.generates for reader in self.request.readers):
            canvas = self.canvases[0].canvas
            tokens = tuple(canvas.response[: self.end.length(canvas.settled_lead)].tolist())
        record, usage = self.record, self.record.usage
        holes = self.pending.response.holes
        usage.completion_tokens = sum(min(hole.stop, len(tokens)) - hole.start for hole in holes if tokens)
        usage.steps, usage.correction_steps = self.decoder.step, self.decoder.context.corrections
        return Result(
            id=self.id,
            token_ids=tokens,
            finish_reason=reason,
            usage=replace(usage),  # a closing pass may follow, and a reported result must not change
            trace=tuple(record.trace),
            first_settled_s=record.first_settled,
            elapsed_s=self.pending.elapsed_s,
            error=error,
            reads={reader.name: read for reader in self.readers if (read := reader.result()) is not None},
        )

    def _read_pass(self, turn: Turn) -> ReadPass:
        decoder = self.decoder if turn.decoder is None else turn.decoder
        paired = len(self.canvases) == 2 == len(turn.items)
        again = paired and self.policy.guides(decoder.step - self.planner.first_step + 1)
        return ReadPass(decoder, turn.predicted, paired, again, partial(_layer_work, self, turn.plan))

    def _transfer(self, plan: Plan, predictions: Predicted, chosen: NDArray[np.bool_] | None) -> Transfer | None:
        """Write the tokens that the step transfers, and settle those that are final. None: it transfers nothing.

        `chosen` are the positions that the device has transferred, [predicted]; None: the host chooses.
        """
        decoder, block, tokens = self.decoder, self.decoder.block, None
        forced: Written | None = None
        if chosen is None and self.readers:  # one of them may write the step
            writes = (reader.written(decoder.step) for reader in self.readers)
            forced = next((written for written in writes if written is not None), None)
        if chosen is not None:
            positions, tokens = predictions.positions[chosen], predictions.tokens[chosen]
        elif forced is not None:
            positions, tokens = forced
        elif plan.transfer is not None:
            positions = plan.transfer.nonzero()[0]
        else:
            whole = predictions.positions
            # A repeated plan predicts positions of its block only.
            if not plan.again and len(whole) and not block.start <= whole[0] <= whole[-1] < block.stop:
                positions = decoder.choose(predictions.select((whole >= block.start) & (whole < block.stop)))
            else:
                positions = decoder.choose(predictions)
        outcome = decoder.outcome(positions)
        if tokens is None:
            tokens = outcome.tokens
        if tokens is None:
            tokens = predictions.tokens[predictions.positions.searchsorted(positions)]
        for state in self.canvases:
            state.canvas.tokens[positions] = tokens
            state.canvas.settle(outcome.final, decoder.step - self.planner.first_step)
            if chosen is None and state.unsent is not None:  # else the device has them, or nothing yet
                state.unsent += positions, outcome.final
        if outcome.resets is not None:
            self._put(*outcome.resets)
        transfer = None
        if len(positions) or outcome.writes:
            edits = () if outcome.edits is None else tuple(outcome.edits.tolist())
            places, ids = tuple(positions.tolist()), tuple(tokens.tolist())
            transfer = Transfer(decoder.step, places, ids, edits, writes=outcome.writes)
            for reader in self.readers:
                reader.transferred(transfer)
            self.record.trace.append(transfer)
        return transfer

    def _put(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Put tokens on the canvas that are not final: a draft, or masks where one did not come true."""
        for state in self.canvases:
            state.canvas.write(positions, tokens)
            if state.unsent is not None:
                state.unsent.append(positions)

    def _report(self, transfer: Transfer | None) -> list[Event]:
        events, record, decoding = list[Event](), self.record, self.pending.decoding
        for reader in self.readers:
            events += reader.events(self.id)
        settled = self.end.settle(transfer, decoding, self.decoder)
        if record.first_settled is None and self.end.lead > record.given:
            record.first_settled = self.pending.elapsed_s
        self.done = self.end.reason is not None or (self.decoder.finished and decoding.can_grow)
        if transfer is not None or settled:
            events.append(Event(self.id, transfer=transfer, settled=settled))
        if events:
            record.reported = True
        return events


def _layer_work(running: RunningRequest, plan: Plan) -> tuple[LayerWork, ...]:
    state, request = running.canvases[0], running.request
    shared = min(request.prefix_length, state.canvas.prompt) if state.prefix is None else state.prefix.length
    return layer_work(plan, rows_of(range(shared), len(state.canvas)), state.prefix)
