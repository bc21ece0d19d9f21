"""A request that runs: how it takes part in passes, what its passes transfer, and what they have cost so far."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from remask.core.plan import LastPass, Plan
from remask.core.reading import Reading
from remask.core.request import Draft, FinishReason, Result, Transfer
from remask.core.spans import Mask, rows_of
from remask.core.work import LayerWork, layer_work
from remask.engine.canvas_state import Move
from remask.engine.planned import Items, PlannedRequest
from remask.engine.replay import Replay
from remask.engine.request import Owner
from remask.errors import PlanError
from remask.sampling.logprobs import PredictedLogprobs
from remask.sampling.score import Barred, Extra, Guidance, Residual, RowGroup


@dataclass(frozen=True, slots=True)
class _Residual:
    """The guidance of a pass that predicted `positions`, for steps that run without the unconditional canvas."""

    positions: NDArray[np.int64]
    kept: Guidance

    def at(self, positions: NDArray[np.int64]) -> Residual:
        """The rows of `positions`, which must be among those that were kept."""
        return Residual(self.kept, np.searchsorted(self.positions, positions))


Args = TypeVarTuple("Args")

# What an error of a request is told to come from.
POLICY, MOVING = "its cache policy failed", "its stored parts could not be copied"
PASS = "its pass failed"


class Scores(NamedTuple):
    """What was read of each predicted position of one request.

    Attributes:
        tokens: int64 [predicted].
        confidence: float32 [predicted].
        more: what else the request asks to be read, float32 [n, predicted].
        chosen: which positions the device has transferred, bool [predicted]; None: the host is to choose.
    """

    tokens: NDArray[np.int64]
    confidence: NDArray[np.float32]
    more: NDArray[np.float32]
    chosen: NDArray[np.bool_] | None = None

    def of(self, some: NDArray[np.bool_]) -> "Scores":
        """Those of `some` of the positions."""
        chosen = None if self.chosen is None else self.chosen[some]
        return Scores(self.tokens[some], self.confidence[some], self.more[:, some], chosen)


NO_SCORES = Scores(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32), np.empty((0, 0), dtype=np.float32))


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


@dataclass(slots=True, eq=False)
class RunningRequest(PlannedRequest):
    """A request that runs: the `Member` of passes that denoises a canvas.

    Attributes:
        moves: K/V that are still to be copied from the store before its first pass.
        owner: whose turn it takes.
        canvases: how many it has.
        ids: its name, as `Lifecycle.at_work` tells it.
        trace: tokens that it has transferred.
        reported: whether anything but its start has been reported.
        released: it has ended, and owns nothing any more.
    """

    moves: list[Move] = field(default_factory=list)
    owner: Owner = field(init=False)
    canvases: int = field(init=False)
    ids: tuple[str, ...] = field(init=False)
    trace: list[Transfer] = field(default_factory=list)
    reported: bool = False
    released: bool = False
    _unpadded: Mask | None = None  # [T], the positions that must not hold padding, where there are any
    _given: int = field(init=False)  # leading response tokens that were final from the start
    _first_settled: float | None = None  # seconds from its arrival to the first final response token
    _reads_too: Extra | None = field(init=False)  # what the policy has read of every row
    _residual: _Residual | None = None
    _extra: NDArray[np.float32] | None = None  # [predicted], read of the pass that ends
    _predicted: NDArray[np.int64] = field(init=False)  # [T], the token that was last predicted at each position
    _logprobs: PredictedLogprobs | None = field(init=False)
    _replay: Replay | None = field(init=False)
    _reads: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of the slots of its `Reading`
    _fill_passes: list[tuple[LayerWork, ...]] = field(default_factory=list)  # of this step, where drafts are wanted

    def __post_init__(self) -> None:
        PlannedRequest.__post_init__(self)
        canvas, asked = self.branches[0].canvas, self.request
        self.owner, self.canvases, self.ids = asked.owner, self.pending.canvases, (asked.id,)
        self._reads_too = self.policy.traits.reads
        self._predicted, self._given = canvas.tokens.copy(), canvas.settled_lead
        if self._template.unpadded.any():
            self._unpadded = np.zeros(len(canvas), dtype=np.bool_)
            self._unpadded[canvas.prompt : canvas.end] = self._template.unpadded
        self._logprobs = None if asked.top_logprobs is None else PredictedLogprobs(len(canvas), asked.top_logprobs)
        self._replay = None if asked.replay is None else Replay(asked.replay, self.pending.decoding.total_steps)

    @property
    def ready(self) -> bool:
        """Whether it can run: the passes over the entries that it leases, if any, are done."""
        return all(lease.entry.ready for lease in self.leases)

    def prepare(self, loop: RequestLoop) -> bool:
        """See `Member`: its policy plans the next pass."""
        return loop.guarded(self, POLICY, self.items)

    def offer(self, row_layers: int | None) -> int:  # noqa: ARG002
        """See `Member`: its pass is never cut."""
        return self.tally.cost

    def enter(self, loop: RequestLoop, batch: RequestList) -> None:
        """See `Member`: its plan is entered into its ledgers, and what it reads at other positions is copied."""
        if loop.guarded(self, POLICY, self.admit) and (not self.moves or loop.guarded(self, MOVING, loop.move, self)):
            batch.requests.append(self)

    def join(self, batch: RequestList) -> None:
        """See `Member`."""
        batch.requests.append(self)

    def ran(self, loop: RequestLoop, scores: Scores) -> None:
        """See `Member`: what was predicted is transferred."""
        loop.settle(self, scores)

    def failed(self, loop: RequestLoop, error: Exception) -> None:
        """See `Member`: it ends."""
        loop.fail(self, error, PASS)

    def admit(self) -> None:
        """Enter the next pass into the ledgers. Raises `PlanError` where a policy planned what cannot be run."""
        items = self.items()
        first = items[0][1]
        if first.fills and self._pass_index > len(self.branches[0].canvas):
            raise PlanError("a step has more fill passes than the canvas has positions, and would never end")
        if len(items) < len(self.branches) and self.predicted and self._residual is None:
            raise PlanError("the unconditional canvas is left out before any step has run it, so there is no guidance")
        for branch, plan in items:
            branch.admit(plan)

    def rows(self, at: int) -> RowGroup | None:
        """How its logits are read if they begin at row `at` of the pass; None where it predicts nothing."""
        positions = self.plan.predicted
        count = len(positions)
        if count == 0:
            return None
        group = self.decoder.group(slice(at, at + count), positions)
        # The group is the decoder's answer to this call, and nobody else's.
        request = self.request
        group.extra, group.top_logprobs = self.extra, request.top_logprobs
        if self._replay is not None:
            group.given = self._replay.given(self.decoder.step, positions)
        if request.constraint is not None:
            group.classes = request.constraint.table
        if self._unpadded is not None and (rows := self._unpadded[positions]).any():
            group.barred = Barred(self._template.padding, rows)
        if len(self.branches) == 2:
            self._guide(group, positions, at + count)
        return group

    def _guide(self, group: RowGroup, positions: NDArray[np.int64], after: int) -> None:
        """Add guidance to `group`; the rows of the unconditional canvas, where it takes part, begin at `after`."""
        group.cfg_scale = self.request.params.cfg_scale
        if len(self.items()) == 2:
            group.guide = slice(after, after + len(positions))
            group.keep = None if self.policy.guides(self.decoder.step + 1) else Guidance()
        elif self._residual is not None:
            group.residual = self._residual.at(positions)

    @property
    def extra(self) -> Extra | None:
        """The extra number that is read of every row, for the decoder or else for the policy."""
        return self.decoder.extra or self._reads_too

    def scored(self, group: RowGroup) -> None:
        """Keep the guidance of this pass where the next step runs without the unconditional canvas."""
        if group.keep is not None:
            self._residual = _Residual(self.plan.predicted, group.keep)

    def constrained(self, scores: Scores) -> Scores:
        """`scores` of the predicted positions, with tokens that the response's form allows.

        The extra number of each row is taken off, and kept for `apply`.
        """
        self._extra = None
        if self.extra is not None and self.predicted and not self.closing:
            self._extra = scores.more[0]
            scores = scores._replace(more=scores.more[1:])
        constraint = self.request.constraint
        if constraint is None or self._replay is not None or self.closing or not self.predicted:
            return scores
        tokens, confidence, more, _ = scores
        read = np.concatenate([np.stack([tokens.astype(np.float32), confidence]), more])
        canvas, top = self.branches[0].canvas, self.request.top_logprobs
        (hole,) = self._template.holes  # as `check_request` saw to
        scope = range(canvas.prompt + hole.start, canvas.prompt + hole.stop)
        chosen = constraint.choose(canvas, scope, self.decoder.block, self.plan.predicted, read, top)
        return Scores(chosen[0].astype(np.int64), chosen[1], chosen[2:])

    def draft(self, tokens: NDArray[np.int64], confidence: NDArray[np.float32]) -> Draft:
        """What the pass in `plan` predicted, before any of it is transferred; arrays are [predicted]."""
        return Draft(
            step=self.decoder.step,
            positions=tuple(self.plan.predicted.tolist()),
            token_ids=tuple(tokens.tolist()),
            confidences=tuple(confidence.tolist()),
            passes=(*self._fill_passes, self._layer_work()),
        )

    def apply(self, scores: Scores) -> Transfer | None:
        """End the pass, and transfer what the plan, the device or the sampler chooses; None: nothing is transferred."""
        tokens, confidence, logprobs, chosen = scores
        items = self.items()
        plan = items[0][1]
        self._count_pass(items)
        self._items = None
        if self.sharing is not None:
            self.sharing.computed(plan, self.sharing.ready())
        if plan.fills:
            self._filled(items)
            return None
        self._clock += len(items) - 1
        positions = plan.predicted
        entropies = self._extra if self.decoder.extra is None else None
        self._last_pass = LastPass(positions, tokens, confidence, entropies)
        if self._extra is not None:
            self.decoder.note(positions, self._extra)
        if self._logprobs is not None:
            self._logprobs.note(positions, logprobs)
        if self.request.reading is not None:
            self._reads = self._read(self.request.reading, positions, logprobs)
        if chosen is None:
            transfer = self._write(*self._choose(plan, positions, tokens, confidence))
        else:
            self._predicted[positions] = tokens
            transfer = self._write(positions[chosen], tokens[chosen], told=False)
        self.end.note(transfer)
        if self._first_settled is None and self.branches[0].canvas.settled_lead > self._given:
            self._first_settled = self.pending.elapsed_s
        self._pass_index = self._left_out = 0
        if self._fill_passes:
            self._fill_passes.clear()
        self.decoder.advance()
        return transfer

    def _filled(self, items: Items) -> None:
        """Count a fill pass of `items`."""
        self._pass_index += 1
        self._left_out += len(self.branches) - len(items)

    def close(self) -> bool:
        """Whether one more pass, over the last block, completes a page for other requests. That pass comes next."""
        if self.sharing is None or self.closing:
            return False
        self.closing = self.sharing.would_complete(self.sharing.ready())
        return self.closing

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        """The result. A cancelled or failed request has no tokens: a part of a canvas is not a response."""
        tokens: tuple[int, ...] = ()
        if reason in ("stop", "length") and self.request.reading is None:
            canvas = self.branches[0].canvas
            tokens = tuple(canvas.response[: self.end.length(canvas.settled_lead)].tolist())
        self.usage.completion_tokens = sum(min(h.stop, len(tokens)) - h.start for h in self._template.holes if tokens)
        self.usage.steps, self.usage.correction_steps = self.decoder.step, self.decoder.corrections
        return Result(
            id=self.request.id,
            token_ids=tokens,
            finish_reason=reason,
            usage=replace(self.usage),  # a closing pass may follow, and a reported result must not change
            trace=tuple(self.trace),
            first_settled_s=self._first_settled,
            elapsed_s=self.pending.elapsed_s,
            error=error,
            reads=self._reads,
        )

    def _read(
        self, reading: Reading, positions: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> Mapping[int, tuple[float, ...]]:
        """The log-probabilities [n, predicted] of the tokens of each slot."""
        first = self.branches[0].canvas.prompt
        columns = {place: int(np.searchsorted(positions, first + place)) for place in reading.slots}
        return {
            place: tuple(logprobs[: len(tokens), columns[place]].tolist()) for place, tokens in reading.slots.items()
        }

    def _count_pass(self, items: Items) -> None:
        if self.request.drafts and items[0][1].fills:
            self._fill_passes.append(self._layer_work())
        self.usage.forwards += len(items) if self._schedule.own_clocks else 1
        self.usage.row_layers += self._tally.cost

    def _choose(
        self, plan: Plan, positions: NDArray[np.int64], tokens: NDArray[np.int64], confidence: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions that are written at the end of the step, and their tokens."""
        block = self.decoder.block
        if self._replay is not None:
            return self._replay.written(self.decoder.step)
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
        logprobs = ((), ()) if self._logprobs is None else self._logprobs.of(positions)
        transfer = Transfer(decoder.step, tuple(positions.tolist()), tuple(tokens.tolist()), edited, *logprobs)
        self.trace.append(transfer)
        return transfer

    def _layer_work(self) -> tuple[LayerWork, ...]:
        branch, request = self.branches[0], self.request
        asked = range(min(request.prefix_length, branch.canvas.prompt)), *(part.positions for part in request.segments)
        shared = asked if branch.prefix is None else branch.prefix.parts
        return layer_work(self.plan, rows_of(shared, len(branch.canvas)), branch.prefix)
