"""A running request: how it takes part in passes, what its passes transfer, and what they have cost so far."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from remask.engine.planned import CanvasPlans, PlannedRequest
from remask.engine.request import Owner
from remask.errors import PlanError
from remask.plan.plan import LastPass, Plan
from remask.plan.prefix_work import LayerWork, layer_work
from remask.plan.spans import rows_of
from remask.readers.base import Predicted, Reader, ReadPass, Written
from remask.request.result import FinishReason, Result, Transfer, Usage
from remask.sampling.decoder import canvas_step
from remask.sampling.rows import DeviceRead, RowGroup

Reads: TypeAlias = tuple[tuple[Reader, DeviceRead], ...]
"""The readers of a request with their device parts, for one pass."""
Share: TypeAlias = tuple[Reader, NDArray[np.float32]]
"""A reader with its numbers, [width, predicted]."""

Args = TypeVarTuple("Args")

# What failed, in the message of a request's error.
POLICY, MOVING = "its cache policy failed", "its stored parts could not be copied"
PASS = "its pass failed"


class Scores(NamedTuple):
    """Tokens, confidences and readers' numbers of the predicted positions of one request.

    Attributes:
        tokens: int64 [predicted].
        confidence: float32 [predicted].
        shares: the numbers of its readers.
        chosen: the positions that the device has transferred, bool [predicted]; None: the host chooses.
    """

    tokens: NDArray[np.int64]
    confidence: NDArray[np.float32]
    shares: tuple[Share, ...] = ()
    chosen: NDArray[np.bool_] | None = None

    def of(self, some: NDArray[np.bool_]) -> "Scores":
        """Those of `some` of the positions."""
        chosen = None if self.chosen is None else self.chosen[some]
        shares = tuple((reader, numbers[:, some]) for reader, numbers in self.shares)
        return Scores(self.tokens[some], self.confidence[some], shares, chosen)


NO_SCORES = Scores(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


class RequestLoop(Protocol):
    """The part of the engine's loop that a running request calls."""

    def guarded(self, running: "RunningRequest", what: str, act: Callable[[*Args], object], *args: *Args) -> bool:
        """Run `act`, which concerns `running` only. False where it raised: the request has ended with the error."""
        ...

    def move(self, running: "RunningRequest") -> None:
        """Copy the stored parts that the request reads at other positions."""
        ...

    def settle(self, running: "RunningRequest", scores: Scores) -> None:
        """Transfer the predictions of its pass, report them, and end the request if its response is complete."""
        ...

    def fail(self, running: "RunningRequest", error: Exception, what: str) -> None:
        """End the request with `error`; `what` describes it."""
        ...


class RequestList(Protocol):
    """A batch, as far as requests join it."""

    requests: list["RunningRequest"]


@dataclass(slots=True)
class Record:
    """What a request has done so far, for its result.

    Attributes:
        usage: the work of its passes.
        trace: its transfers.
        given: leading response tokens that were final from the start.
        first_settled: seconds from its arrival to the first final response token after the given ones.
        reported: whether an event other than its start has been reported.
    """

    usage: Usage
    trace: list[Transfer] = field(default_factory=list)
    given: int = 0
    first_settled: float | None = None
    reported: bool = False


@dataclass(slots=True, eq=False)
class RunningRequest(PlannedRequest):
    """A running request: the `Member` of passes that denoises a canvas.

    Attributes:
        record: what it has done so far.
        released: it has ended, and its memory is free.
    """

    record: Record
    released: bool = field(init=False, default=False)
    _predicted: NDArray[np.int64] = field(init=False)  # [T], the last token predicted at each position

    def __post_init__(self, vocab: int, before: PlannedRequest | None) -> None:
        PlannedRequest.__post_init__(self, vocab, before)
        canvas = self.branches[0].canvas
        self._predicted = canvas.tokens.copy()
        if before is None:
            self.record.given = canvas.settled_lead

    @property
    def owner(self) -> Owner:
        """See `Member`."""
        return self.request.owner

    @property
    def canvases(self) -> int:
        """See `Member`: two under guidance."""
        return len(self.branches)

    @property
    def ready(self) -> bool:
        """Whether it can run: the entries that it leases are computed."""
        return all(lease.entry.ready for lease in self.claim.leases)

    def prepare(self, loop: RequestLoop) -> bool:
        """See `Member`: its policy plans the next pass."""
        return loop.guarded(self, POLICY, self.items)

    def offer(self, row_layers: int | None) -> int:  # noqa: ARG002
        """See `Member`: its pass is never cut."""
        return self.tally.cost

    def enter(self, loop: RequestLoop, batch: RequestList) -> None:
        """See `Member`: its plan enters its ledgers, and stored parts at other positions are copied."""
        if loop.guarded(self, POLICY, self.admit) and (
            not self.claim.moves or loop.guarded(self, MOVING, loop.move, self)
        ):
            batch.requests.append(self)

    def join(self, batch: RequestList) -> None:
        """See `Member`."""
        batch.requests.append(self)

    def ran(self, loop: RequestLoop, scores: Scores) -> None:
        """See `Member`: its predictions are transferred."""
        loop.settle(self, scores)

    def failed(self, loop: RequestLoop, error: Exception) -> None:
        """See `Member`: it ends."""
        loop.fail(self, error, PASS)

    def admit(self) -> None:
        """Enter the plan of the next pass into the ledgers. Raises `PlanError` on a plan that cannot run."""
        items = self.items()
        first = items[0][1]
        if first.fills and self._count.passes > len(self.branches[0].canvas):
            raise PlanError("a step has more fill passes than the canvas has positions, and would never end")
        if self.readers and len(first.predicted):
            step = self._read_pass(items)
            for reader in self.readers:
                reader.admit(step)
        for branch, plan in items:
            branch.admit(plan)

    def reads(self) -> Reads:
        """The device parts of its readers for the next pass."""
        if not self.readers or not len(self.plan.predicted):
            return ()
        step = self._read_pass(self.items())
        found = ((reader, reader.on_device(step)) for reader in self.readers)
        return tuple((reader, read) for reader, read in found if read is not None)

    def rows(self, at: int, reads: Reads) -> RowGroup | None:
        """How its rows of the logits are read, if the first is row `at`; None where it predicts nothing."""
        positions = self.positions
        after = at + len(positions)
        if after == at:
            return None
        # The decoder made the group for this call, so it may be changed.
        group = self.decoder.group(slice(at, after), positions)
        if reads:
            group.reads = tuple(read for _, read in reads)
        if len(self.branches) == 2 == len(self.items()):
            group.guide = slice(after, after + len(positions))
        return group

    def _read_pass(self, items: CanvasPlans) -> ReadPass:
        paired = len(self.branches) == 2 == len(items)
        again = paired and self.policy.guides(canvas_step(self.decoder) + 1)
        return ReadPass(self.decoder, self.positions, paired, again, partial(_layer_work, self))

    def apply(self, scores: Scores) -> Transfer | None:
        """End the pass, and transfer what the plan, the device or the decoder chooses. None: nothing is transferred."""
        items = self.items()
        plan = items[0][1]
        found = Predicted(plan.predicted, scores.tokens, scores.confidence)
        for reader, numbers in scores.shares:
            reader.choose(found, numbers)
        for reader, numbers in scores.shares:
            reader.read(found, numbers)
        if self.readers and not self.closing:
            step = self._read_pass(items)
            for reader in self.readers:
                reader.ended(step, None if plan.fills else found)
        record, claim = self.record, self.claim
        record.usage.forwards += self.tally.forwards
        record.usage.row_layers += self.tally.cost
        self._items = None
        if claim.shares is not None:
            claim.shares.computed(plan, claim.shares.ready())
        if plan.fills:
            self._count.passes += 1
            self._count.left_out += len(self.branches) > len(items)
            return None
        self._count.paired += len(self.branches) == 2 == len(items)
        self._last_pass = LastPass(found.positions, found.tokens, found.confidence, found.entropies)
        if scores.chosen is None:
            transfer = self._write(*self._choose(plan, found))
        else:
            self._predicted[found.positions] = found.tokens
            transfer = self._write(found.positions[scores.chosen], found.tokens[scores.chosen], device_knows=True)
        self.end.note(transfer)
        if record.first_settled is None and self.branches[0].canvas.settled_lead > record.given:
            record.first_settled = self.pending.elapsed_s
        self._count.passes = self._count.left_out = 0
        self.decoder.advance()
        return transfer

    def close(self) -> bool:
        """Whether one more pass, over the last block, completes a page for other requests. If so it runs next."""
        shares = self.claim.shares
        if shares is None or self.closing:
            return False
        self.closing = shares.would_complete(shares.ready())
        return self.closing

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        """The result. A cancelled or failed request has no tokens: a part of a canvas is not a response."""
        tokens: tuple[int, ...] = ()
        if reason in ("stop", "length") and all(reader.generates for reader in self.request.readers):
            canvas = self.branches[0].canvas
            tokens = tuple(canvas.response[: self.end.length(canvas.settled_lead)].tolist())
        record, usage = self.record, self.record.usage
        holes = self.request.response.holes
        usage.completion_tokens = sum(min(hole.stop, len(tokens)) - hole.start for hole in holes if tokens)
        usage.steps, usage.correction_steps = self.decoder.step, self.decoder.corrections
        return Result(
            id=self.request.id,
            token_ids=tokens,
            finish_reason=reason,
            usage=replace(usage),  # a closing pass may follow, and a reported result must not change
            trace=tuple(record.trace),
            first_settled_s=record.first_settled,
            elapsed_s=self.pending.elapsed_s,
            error=error,
            reads={reader.name: read for reader in self.readers if (read := reader.result()) is not None},
        )

    def _choose(self, plan: Plan, found: Predicted) -> Written:
        """The positions that the step writes, and their tokens."""
        for reader in self.readers:
            given = reader.written(self.decoder.step)
            if given is not None:
                return given
        block, positions, tokens, confidence = self.decoder.block, found.positions, found.tokens, found.confidence
        # A repeated plan predicts positions of its block only.
        if not plan.again and len(positions) and not block.start <= positions[0] <= positions[-1] < block.stop:
            inside = (positions >= block.start) & (positions < block.stop)
            positions, tokens, confidence = positions[inside], tokens[inside], confidence[inside]
        written = (
            self.decoder.choose(positions, tokens, confidence) if plan.commit is None else plan.commit.nonzero()[0]
        )
        self._predicted[positions] = tokens
        return written, self._predicted[written]

    def _write(
        self, positions: NDArray[np.int64], tokens: NDArray[np.int64], *, device_knows: bool = False
    ) -> Transfer | None:
        """Write tokens to the canvases, and settle what is final. `device_knows`: the token buffer has them already."""
        decoder, final, edited = self.decoder, positions, tuple[int, ...]()
        if not decoder.writes_once:
            edited, final = tuple(decoder.edited(positions).tolist()), decoder.final(positions)
        for branch in self.branches:
            branch.canvas.write(positions, tokens)
            branch.canvas.settle(final, decoder.step - decoder.first_step)
            if not device_knows:
                branch.changed(positions)
                branch.changed(final)
        if not len(positions):
            return None
        transfer = Transfer(decoder.step, tuple(positions.tolist()), tuple(tokens.tolist()), edited)
        for reader in self.readers:
            reader.transferred(transfer)
        self.record.trace.append(transfer)
        return transfer


def _layer_work(running: RunningRequest) -> tuple[LayerWork, ...]:
    """The work of the next pass, layer by layer, on what the request shares and on the rest."""
    branch, request = running.branches[0], running.request
    asked = range(min(request.prefix_length, branch.canvas.prompt)), *(part.positions for part in request.segments)
    shared = asked if branch.prefix is None else branch.prefix.parts
    return layer_work(running.plan, rows_of(shared, len(branch.canvas)), branch.prefix)
