"""A request that runs: how it takes part in passes, what its passes transfer, and what they have cost so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from remask.engine.planned import Items, PlannedRequest
from remask.engine.request import Owner
from remask.errors import PlanError
from remask.plan.plan import LastPass, Plan
from remask.plan.prefix_work import LayerWork, layer_work
from remask.plan.spans import rows_of
from remask.readers.base import Predicted, Reader, ReadPass, Written
from remask.request.result import FinishReason, Result, Transfer, Usage
from remask.sampling.rows import DeviceRead, RowGroup
from remask.store.pages import PageRange
from remask.store.prefix import Lease

Reads: TypeAlias = tuple[tuple[Reader, DeviceRead], ...]
"""What the readers of a request do with its rows in one pass."""
Share: TypeAlias = tuple[Reader, NDArray[np.float32]]
"""A reader with what it has read, [width, predicted]."""

Args = TypeVarTuple("Args")

# What an error of a request is told to come from.
POLICY, MOVING = "its cache policy failed", "its stored parts could not be copied"
PASS = "its pass failed"


class Scores(NamedTuple):
    """What was read of each predicted position of one request.

    Attributes:
        tokens: int64 [predicted].
        confidence: float32 [predicted].
        shares: what its readers have read.
        chosen: which positions the device has transferred, bool [predicted]; None: the host is to choose.
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

    def parts(self, counts: Sequence[int]) -> "list[Scores]":
        """Those of so many positions each, in order. The host chooses of them."""
        found, start = [], 0
        for count in counts:
            own = slice(start, start + count)
            start = own.stop
            shares = tuple((reader, numbers[:, own]) for reader, numbers in self.shares)
            found.append(Scores(self.tokens[own], self.confidence[own], shares))
        return found


NO_SCORES = Scores(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


class RequestLoop(Protocol):
    """What a request needs of the engine's loop while it takes part in passes."""

    def guarded(self, running: "RunningRequest", what: str, act: Callable[[*Args], object], *args: *Args) -> bool:
        """Whether `act`, which is about `running` alone, succeeded. Otherwise the request has ended with the error."""
        ...

    def move(self, running: "RunningRequest") -> None:
        """Copy the stored parts that it reads at other positions."""
        ...

    def settle(self, running: "RunningRequest", scores: Scores) -> None:
        """Transfer what its pass predicted, report it, and end the request where its response is complete."""
        ...

    def fail(self, running: "RunningRequest", error: Exception, what: str) -> None:
        """End it with `error`, of which `what` is said."""
        ...


class RequestList(Protocol):
    """Where the requests of a pass are listed."""

    requests: list["RunningRequest"]


@dataclass(slots=True)
class Record:
    """What a request has done so far.

    Attributes:
        usage: the work of its passes.
        trace: tokens that it has transferred.
        given: leading response tokens that were final from the start.
        first_settled: seconds from its arrival to the first final response token beyond these.
        reported: whether anything but its start has been reported.
    """

    usage: Usage
    trace: list[Transfer] = field(default_factory=list)
    given: int = 0
    first_settled: float | None = None
    reported: bool = False


@dataclass(slots=True, eq=False)
class RunningRequest(PlannedRequest):
    """A request that runs: the `Member` of passes that denoises a canvas.

    Attributes:
        record: what it has done so far.
        released: it has ended, and owns nothing any more.
    """

    record: Record
    released: bool = field(init=False, default=False)
    _predicted: NDArray[np.int64] = field(init=False)  # [T], the token that was last predicted at each position

    def __post_init__(self, vocab: int) -> None:
        PlannedRequest.__post_init__(self, vocab)
        canvas = self.branches[0].canvas
        self._predicted, self.record.given = canvas.tokens.copy(), canvas.settled_lead

    @property
    def owner(self) -> Owner:
        """Whose turn it takes."""
        return self.request.owner

    @property
    def canvases(self) -> int:
        """How many it has."""
        return len(self.branches)

    @property
    def ids(self) -> tuple[str, ...]:
        """Its name, as `Lifecycle.at_work` tells it."""
        return (self.request.id,)

    @property
    def owned(self) -> Sequence[PageRange]:
        """Pages that it holds references to, beside those of its leases."""
        return self.claim.owned

    @property
    def leases(self) -> Sequence[Lease]:
        """The stored parts that it reads, in the order of its canvas."""
        return self.claim.leases

    @property
    def ready(self) -> bool:
        """Whether it can run: the passes over the entries that it leases, if any, are done."""
        leases = self.claim.leases
        return not leases or all(lease.entry.ready for lease in leases)

    def prepare(self, loop: RequestLoop) -> bool:
        """See `Member`: its policy plans the next pass."""
        return loop.guarded(self, POLICY, self.items)

    def offer(self, row_layers: int | None) -> int:
        """See `Member`: its pass is never cut, but where it would be too much drafts are left out."""
        if row_layers is not None and self.tally.cost > row_layers:
            self.undrafted()
        return self.tally.cost

    def enter(self, loop: RequestLoop, batch: RequestList) -> None:
        """See `Member`: its plan is entered into its ledgers, and what it reads at other positions is copied."""
        if loop.guarded(self, POLICY, self.admit) and (
            not self.claim.moves or loop.guarded(self, MOVING, loop.move, self)
        ):
            batch.requests.append(self)

    def join(self, batch: RequestList) -> None:
        """See `Member`."""
        batch.requests.append(self)

    def ran(self, loop: RequestLoop, scores: Scores) -> None:
        """See `Member`: what was predicted is transferred, and what was of drafts, as far as these come true."""
        if self.claim.drafting is None:
            loop.settle(self, scores)
            return
        items = self.items()
        own, *others = scores.parts([len(plan.predicted) for _, plan in items])
        drafts = list(zip((draft for draft, _ in items[1:]), others, strict=True))
        loop.settle(self, own)
        drafting, accepted, usage = self.claim.drafting, 0, self.record.usage
        while not self.released:
            known = next((scores for draft, scores in drafts if self.drafted(draft)), None)
            if known is None:
                break
            accepted += 1
            usage.accepted = (usage.accepted or 0) + 1
            loop.settle(self, known)
        if drafting is not None:
            drafting.note(len(drafts), accepted)

    def failed(self, loop: RequestLoop, error: Exception) -> None:
        """See `Member`: it ends."""
        loop.fail(self, error, PASS)

    def admit(self) -> None:
        """Enter the next pass into the ledgers. Raises `PlanError` where a policy planned what cannot be run."""
        items = self.items()
        first = items[0][1]
        if first.fills and self._count.passes > len(self.branches[0].canvas):
            raise PlanError("a step has more fill passes than the canvas has positions, and would never end")
        if self.readers and self.predicted:
            step = self._read_pass()
            for reader in self.readers:
                reader.admit(step)
        for branch, plan in items:
            branch.admit(plan)

    def reads(self) -> Reads:
        """What its readers do with the predicted rows of the next pass."""
        if not self.readers or not self.predicted:
            return ()
        step = self._read_pass()
        found = ((reader, reader.on_device(step)) for reader in self.readers)
        return tuple((reader, read) for reader, read in found if read is not None)

    def rows(self, at: int, reads: Reads) -> RowGroup | None:
        """How its logits are read if they begin at row `at` of the pass; None where it predicts nothing."""
        positions = self.positions
        after = at + len(positions)
        if after == at:
            return None
        # The group is the decoder's answer to this call, and nobody else's.
        group = self.decoder.group(slice(at, after), positions)
        if reads:
            group.reads = tuple(read for _, read in reads)
        if self.paired:
            group.guide = slice(after, after + len(positions))
        return group

    def _read_pass(self) -> ReadPass:
        again = self.paired and self.policy.guides(self.decoder.step + 1)
        return ReadPass(self.decoder, self.positions, self.paired, again, self._layer_work)

    def apply(self, scores: Scores) -> Transfer | None:
        """End the pass, and transfer what the plan, the device or the sampler chooses; None: nothing is transferred."""
        items = self.items()
        plan = items[0][1]
        found = Predicted(plan.predicted, scores.tokens, scores.confidence)
        for reader, numbers in scores.shares:
            reader.choose(found, numbers)
        for reader, numbers in scores.shares:
            reader.read(found, numbers)
        if self.readers and not self.closing:
            step = self._read_pass()
            for reader in self.readers:
                reader.ended(step, None if plan.fills else found)
        record, claim, paired = self.record, self.claim, self.paired
        record.usage.forwards += self._tally.forwards
        record.usage.row_layers += self._tally.cost
        self._items = None
        if claim.shares is not None:
            claim.shares.computed(plan, claim.shares.ready())
        if plan.fills:
            self._filled(items)
            return None
        self._count.paired += paired
        self._last_pass = LastPass(found.positions, found.tokens, found.confidence, found.entropies)
        if scores.chosen is None:
            transfer = self._write(*self._choose(plan, found))
        else:
            self._predicted[found.positions] = found.tokens
            transfer = self._write(found.positions[scores.chosen], found.tokens[scores.chosen], told=False)
        self.end.note(transfer)
        if record.first_settled is None and self.branches[0].canvas.settled_lead > record.given:
            record.first_settled = self.pending.elapsed_s
        self._count.passes = self._count.left_out = 0
        self.decoder.advance()
        return transfer

    def _filled(self, items: Items) -> None:
        """Count a fill pass of `items`."""
        self._count.passes += 1
        self._count.left_out += len(self.branches) - len(items)

    def close(self) -> bool:
        """Whether one more pass, over the last block, completes a page for other requests. That pass comes next."""
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
        """Positions that are written at the end of the step, and their tokens."""
        for reader in self.readers:
            given = reader.written(self.decoder.step)
            if given is not None:
                return given
        block, positions, tokens, confidence = self.decoder.block, found.positions, found.tokens, found.confidence
        # A plan that repeats one of the block predicts nothing else.
        if not plan.again and len(positions) and not block.start <= positions[0] <= positions[-1] < block.stop:
            inside = (positions >= block.start) & (positions < block.stop)
            positions, tokens, confidence = positions[inside], tokens[inside], confidence[inside]
        written = (
            self.decoder.choose(positions, tokens, confidence) if plan.commit is None else plan.commit.nonzero()[0]
        )
        self._predicted[positions] = tokens
        return written, self._predicted[written]

    def _write(self, positions: NDArray[np.int64], tokens: NDArray[np.int64], *, told: bool = True) -> Transfer | None:
        """Put tokens at `positions`, with what follows from it. The device is to be `told`, unless it knows."""
        decoder = self.decoder
        edits, final = decoder.edited(positions), decoder.final(positions)
        for branch in self.branches:
            branch.canvas.write(positions, tokens)
            branch.canvas.settle(final, decoder.step)
            if told:
                branch.changed(positions)
                branch.changed(final)
        if not len(positions):
            return None
        edited = tuple(edits.tolist()) if len(edits) else ()
        transfer = Transfer(decoder.step, tuple(positions.tolist()), tuple(tokens.tolist()), edited)
        for reader in self.readers:
            reader.transferred(transfer)
        self.record.trace.append(transfer)
        return transfer

    def _layer_work(self) -> tuple[LayerWork, ...]:
        branch, request = self.branches[0], self.request
        asked = range(min(request.prefix_length, branch.canvas.prompt)), *(part.positions for part in request.segments)
        shared = asked if branch.prefix is None else branch.prefix.parts
        return layer_work(self.plan, rows_of(shared, len(branch.canvas)), branch.prefix)
