"""A running request: its turns in passes, the tokens that it writes to its canvas, and its cost so far."""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from remask.engine.canvas_state import CanvasState, Move
from remask.engine.member import CanvasPlans, DeviceReads, EngineStats, Member, Scores, Tally, Turn
from remask.engine.placement import Claim
from remask.engine.planning import PassPlanner, ResponseEnd
from remask.engine.request import PendingRequest, Request
from remask.errors import PlanError
from remask.model.config import ModelConfig
from remask.plan.pass_cost import LayerWork, layer_work
from remask.plan.plan import LastPass, Plan
from remask.plan.spans import rows_of
from remask.policies.base import CachePolicy
from remask.readers.base import Reader, ReadPass, Start, Written
from remask.readers.implied import readers_of
from remask.request.result import Event, FinishReason, Result, Transfer, Usage
from remask.sampling.decoder import Predictions


@dataclass(slots=True)
class RequestRecord:
    """What a request has done so far, for its result."""

    usage: Usage  # the work of its passes
    trace: list[Transfer] = field(default_factory=list)
    fixed_lead: int = 0  # leading response tokens that were final from the start
    first_settled_s: float | None = None  # seconds from its arrival to the first final response token after these
    has_reported: bool = False  # whether an event other than its start has been reported
    prefix_length: int = 0  # leading tokens that it shares with other requests, read from the store or not


class RunningRequest(Member):
    """The `Member` of passes that denoises a canvas.

    Attributes:
        canvases: the conditional canvas and, under guidance, the unconditional one.
        claim: its pages and leases.
        closing: whether its result is reported, and one more pass completes a page for other requests.
    """

    def __init__(
        self,
        pending: PendingRequest,
        policy: CachePolicy,
        canvases: tuple[CanvasState, ...],
        claim: Claim,
        *,
        record: RequestRecord,
        config: ModelConfig,
        predecessor: "RunningRequest | None" = None,
    ) -> None:
        """`config` is that of the model. `predecessor` is the request before its canvas grew; None on its first canvas.

        On the first canvas, `record.fixed_lead` is set.
        """
        request = pending.request
        canvas = canvases[0].canvas
        self.pending = pending
        self.policy = policy
        self.canvases = canvases
        self.claim = claim
        self.record = record
        self.id = request.id
        self.owner = request.owner
        self.sort_key = 1, request.adapter or "", canvases[0].sharing_key
        self.decoder = pending.decoding.decoder(canvas, policy.traits.schedule.idle_passes)
        self.end: ResponseEnd  # looks for the end of the response
        self.readers: tuple[Reader, ...]
        if predecessor is not None:
            self.end = predecessor.end
            self.readers = predecessor.readers
        else:
            record.fixed_lead = canvas.settled_lead
            self.end = ResponseEnd(canvas, pending.response, pending.stops, has_form=request.has_form)
            start = Start(canvas, pending.response, pending.decoding.total_steps, config, request.readers)
            self.readers = readers_of(start, self.decoder, policy, request.params)
        self.planner = PassPlanner(pending, policy, self.end, self.readers, first_step=pending.decoding.first_step)
        self.turn: Turn | None = None  # its next turn, once that is planned
        self.closing = False
        self.is_done = False
        self.ended = False
        self.ready = claim.lease is None or claim.lease.entry.ready
        self.min_cost: int | None = None
        self.opening_step = self.decoder.step if predecessor is None else None
        all_readers = (*request.readers, *self.readers)
        self.foreseeable = policy.traits.by_clock and all(reader.foreseeable for reader in all_readers)

    @property
    def request(self) -> Request:
        """The request as it was submitted."""
        return self.pending.request

    def plan(self) -> Turn:
        """Plan the next turn, unless it is planned already. A plan that repeats has the tally of its first pass."""
        if self.turn is not None:
            return self.turn
        planner, decoder, first = self.planner, self.decoder, self.canvases[0]
        first.conditioned = decoder.context.conditioned
        repeated = None if self.closing else planner.repeat_plan(decoder, first.canvas.noisy)
        if repeated is not None:
            items: CanvasPlans = ((first, repeated),)
        elif self.closing:
            # After a stop token the decoder is at the next block, so the settled length says where the last block ends.
            stop = 0 if self.claim.publisher is None else self.claim.publisher.settled_length()
            block = range(stop - self.pending.decoding.block_length, stop)
            items = planner.plan_closing(first, decoder, block)
        else:
            items = planner.plan(self.canvases, decoder)
        repeating = planner.repeating
        tally = self.tally(items) if repeating is None or repeating.tally is None else repeating.tally
        if repeating is not None:
            repeating.tally = tally
        self.turn = Turn(self, items, tally, decoder, predicted=items[0][1].predicted)
        return self.turn

    def fit(self, turn: Turn, row_layers: int) -> None:
        """Does nothing, as the pass of a request cannot be cut."""

    def begin(self, turn: Turn) -> Move | None:
        """See `Member`. Raises `PlanError` too if a reader cannot read the pass, or if fill passes would never end."""
        first_plan = turn.items[0][1]
        if first_plan.fills and self.planner.passes > len(self.canvases[0].canvas):
            raise PlanError("a step has more fill passes than the canvas has positions, and would never end")
        if self.readers and len(first_plan.predicted):
            read_pass = self._read_pass(turn)
            for reader in self.readers:
                reader.admit(read_pass)
        for state, plan in turn.items:
            if plan.again:  # the canvas needs no check, as the plan predicts a subset of what the last one did
                state.ledger.enter(plan)
            else:
                state.enter(plan)
        move = self.claim.move
        self.claim.move = None
        return move

    def tally(self, items: CanvasPlans) -> Tally:
        """See `Member`. A pass over two canvases counts as two forwards if the policy counts their steps separately."""
        first, plan = items[0]
        live, prefix = plan.spans[-1].rows, first.prefix
        leased_rows = prefix.length if self.claim.lease is not None and prefix is not None else 0
        return Tally(
            cost=sum(plan.cost for _, plan in items),
            max_rows=sum(plan.widest for _, plan in items),
            forwards=len(items) if self.policy.traits.schedule.own_clocks else 1,
            row_layers_saved=sum(len(state.canvas) * plan.layers - plan.cost for state, plan in items),
            refreshes=any(plan.refreshes for _, plan in items),
            refreshes_prefix=bool(live[:leased_rows].any()),
        )

    def device_reads(self, turn: Turn) -> DeviceReads:
        # Draft passes only propose tokens, which readers see when a later pass verifies them.
        if not len(turn.plan.predicted) or self.decoder.context.drafts:
            return ()
        read_pass = self._read_pass(turn)
        reads = ((reader, reader.on_device(read_pass)) for reader in self.readers)
        return tuple((reader, read) for reader, read in reads if read is not None)

    def write(self, turn: Turn, scores: Scores, stats: EngineStats) -> list[Event]:
        """See `Member`. Readers change and read the predictions before the step's tokens are written to the canvas.

        A fill pass writes no final tokens, and the closing pass, which ends the request, none at all.
        """
        items, tally = turn.items, turn.tally
        planner, publisher = self.planner, self.claim.publisher
        plan, context = items[0][1], self.decoder.context
        stats.refreshes += tally.refreshes
        stats.prefix_refreshes += tally.refreshes_prefix
        stats.row_layers_saved += tally.row_layers_saved
        if tally.forwards and (self.min_cost is None or tally.cost < self.min_cost):
            self.min_cost = tally.cost
        self.turn = None
        predictions = Predictions(plan.predicted, scores.tokens, scores.confidence)
        for reader, numbers in scores.reader_numbers:
            reader.choose(predictions, numbers)
        for reader, numbers in scores.reader_numbers:
            reader.read(predictions, numbers)
        if self.readers and not self.closing:
            read_pass = self._read_pass(turn)
            for reader in self.readers:
                reader.end_pass(read_pass, None if plan.fills else predictions)
        self.record.usage.forwards += tally.forwards
        self.record.usage.row_layers += tally.cost
        if publisher is not None and context.committed is None:
            publisher.record_pass(plan, publisher.settled_length())
        if self.closing:
            self.is_done = True
            return []
        if plan.fills:
            planner.passes += 1
            planner.skipped_fills += len(self.canvases) > len(items)
            if context.drafts and len(predictions.positions):
                self._write_tokens(predictions.positions, predictions.tokens)
                self.decoder.advance()
            return self._report(None)
        planner.last_pass = LastPass(
            predictions.positions, predictions.tokens, predictions.confidence, measured=predictions.measured
        )
        planner.guided_steps += len(self.canvases) == 2 == len(items)
        planner.passes = 0
        planner.skipped_fills = 0
        transfer = self._transfer(plan, predictions, scores.transfer)
        self.decoder.advance()
        committed = self.decoder.context.committed
        if publisher is not None and committed is not None:
            publisher.commit(committed)
        return self._report(transfer)

    def close(self) -> bool:
        """Request a closing pass over the last block if it completes a page for others. Returns whether it does."""
        publisher = self.claim.publisher
        if publisher is None or self.closing or self.decoder.context.committed is not None:
            return False
        self.closing = publisher.would_complete(publisher.settled_length())
        self.is_done = not self.closing
        return self.closing

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        """Complete the usage, and return the result. It has no tokens if the request was cancelled or failed."""
        tokens: tuple[int, ...] = ()
        if reason in ("stop", "length") and all(reader.generates for reader in self.request.readers):
            canvas = self.canvases[0].canvas
            tokens = tuple(canvas.response[: self.end.find_stop_length(canvas.settled_lead)].tolist())
        record, usage = self.record, self.record.usage
        holes = self.pending.response.holes
        usage.completion_tokens = sum(min(hole.stop, len(tokens)) - hole.start for hole in holes if tokens)
        usage.steps = self.decoder.step
        usage.correction_steps = self.decoder.context.corrections
        return Result(
            id=self.id,
            token_ids=tokens,
            finish_reason=reason,
            usage=replace(usage),  # a closing pass may follow, and a reported result must not change
            trace=tuple(record.trace),
            first_settled_s=record.first_settled_s,
            elapsed_s=self.pending.elapsed_s,
            error=error,
            reads={reader.name: read for reader in self.readers if (read := reader.result()) is not None},
        )

    def _read_pass(self, turn: Turn) -> ReadPass:
        """The pass of `turn` as readers see it."""
        decoder = self.decoder if turn.decoder is None else turn.decoder
        is_guided = len(self.canvases) == 2 == len(turn.items)
        guides_next = is_guided and self.policy.guides(decoder.step - self.planner.first_step + 1)
        return ReadPass(decoder, turn.predicted, is_guided, guides_next, partial(_layer_work, self, turn.plan))

    def _transfer(self, plan: Plan, predictions: Predictions, device_mask: NDArray[np.bool_] | None) -> Transfer | None:
        """Write the tokens that the step transfers, and settle those that are final.

        `device_mask` has the positions that the device has transferred, bool [predicted]; None if the host chooses
        them. Returns None if nothing is transferred.
        """
        decoder, block = self.decoder, self.decoder.block
        tokens: NDArray[np.int64] | None = None
        forced = self._forced_tokens() if device_mask is None and self.readers else None
        if device_mask is not None:
            positions, tokens = predictions.positions[device_mask], predictions.tokens[device_mask]
        elif forced is not None:
            positions, tokens = forced
        elif plan.transfer is not None:
            positions = plan.transfer.nonzero()[0]
        else:
            predicted = predictions.positions
            # A repeated plan predicts positions of its block only.
            if not plan.again and len(predicted) and not block.start <= predicted[0] <= predicted[-1] < block.stop:
                predictions_in_block = predictions.select((predicted >= block.start) & (predicted < block.stop))
                positions = decoder.choose(predictions_in_block)
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
            # Otherwise the device has the tokens already, or has none of the canvas yet.
            if device_mask is None and state.unsent is not None:
                state.unsent += positions, outcome.final
        if outcome.resets is not None:
            self._write_tokens(*outcome.resets)
        transfer = None
        if len(positions) or outcome.writes:
            edits = () if outcome.edits is None else tuple(outcome.edits.tolist())
            transfer = Transfer(
                decoder.step, tuple(positions.tolist()), tuple(tokens.tolist()), edits, writes=outcome.writes
            )
            for reader in self.readers:
                reader.complete_transfer(transfer)
            self.record.trace.append(transfer)
        return transfer

    def _forced_tokens(self) -> Written | None:
        """What a reader prescribes for this step; None if none does."""
        writes = (reader.step_writes(self.decoder.step) for reader in self.readers)
        return next((written for written in writes if written is not None), None)

    def _write_tokens(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Write tokens that are not final: a draft, or masks in place of a rejected one."""
        for state in self.canvases:
            state.canvas.write(positions, tokens)
            if state.unsent is not None:
                state.unsent.append(positions)

    def _report(self, transfer: Transfer | None) -> list[Event]:
        """The events of a pass that was written. Sets `is_done` if the response is complete or its canvas must grow."""
        events = list[Event]()
        record, decoding = self.record, self.pending.decoding
        for reader in self.readers:
            events += reader.events(self.id)
        settled = self.end.settle(transfer, decoding, self.decoder)
        if record.first_settled_s is None and self.end.lead > record.fixed_lead:
            record.first_settled_s = self.pending.elapsed_s
        self.is_done = self.end.reason is not None or (self.decoder.finished and decoding.can_grow)
        if transfer is not None or settled:
            events.append(Event(self.id, transfer=transfer, settled=settled))
        if events:
            record.has_reported = True
        return events


def _layer_work(running: RunningRequest, plan: Plan) -> tuple[LayerWork, ...]:
    """The work of `plan` on the conditional canvas, by layers. The prefix counts as shared also if none is stored."""
    state, request = running.canvases[0], running.request
    shared = min(request.prefix_length, state.canvas.prompt) if state.prefix is None else state.prefix.length
    return layer_work(plan, rows_of(range(shared), len(state.canvas)), state.prefix)
