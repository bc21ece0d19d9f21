"""A request that runs: its canvases, its decoding state, and what it has cost so far."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from remask.core.canvas import Template
from remask.core.plan import LastPass, Plan, StepFacts, View
from remask.core.reading import Reading
from remask.core.request import Draft, FinishReason, Result, Transfer, Usage
from remask.core.spans import Mask, rows_of
from remask.core.work import LayerWork, layer_work
from remask.engine.canvas_state import CanvasState, Move
from remask.engine.ending import ResponseEnd
from remask.engine.pending import PendingRequest
from remask.engine.replay import Replay
from remask.engine.request import Owner, Request
from remask.engine.sharing.publishing import PageSharing
from remask.errors import PlanError
from remask.policies.base import CachePolicy, Schedule
from remask.sampling.choice import Candidates
from remask.sampling.decoder import Decoder, Transfers
from remask.sampling.logprobs import PredictedLogprobs
from remask.sampling.score import Barred, Extra, Guidance, Residual, RowGroup
from remask.store.pages import PageRange
from remask.store.prefix import Lease


@dataclass(frozen=True, slots=True)
class _Residual:
    """The guidance of a pass that predicted `positions`, for steps that run without the unconditional canvas."""

    positions: NDArray[np.int64]
    kept: Guidance

    def at(self, positions: NDArray[np.int64]) -> Residual:
        """The rows of `positions`, which must be among those that were kept."""
        return Residual(self.kept, np.searchsorted(self.positions, positions))


Args = TypeVarTuple("Args")
Items: TypeAlias = tuple[tuple[CanvasState, Plan], ...]

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


@dataclass(frozen=True, slots=True)
class Tally:
    """What a pass of a request counts as.

    Attributes:
        cost: row-layers that it computes.
        rows: most rows that it has in any layer.
        saved: row-layers of its canvases that it does not compute.
        refreshes: it fills or renews what the policy caches, on any of its canvases.
        refreshes_prefix: it computes rows of the leased prefix, above the boundary.
    """

    cost: int
    rows: int
    saved: int
    refreshes: bool
    refreshes_prefix: bool


@dataclass(frozen=True, slots=True)
class _Standing:
    """A plan that `repeats` in as many steps after `step`, which was the one numbered `block_step` of its block."""

    plan: Plan
    repeats: int
    step: int
    block_step: int
    block: range


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request with its place in memory: the `Member` of passes that denoises a canvas.

    Attributes:
        pending: what it was before it began.
        policy: the cache policy that plans its passes.
        layers: the model's layers.
        branches: the conditional canvas and, under guidance, the unconditional one.
        owned: pages that it holds references to, beside those of its leases.
        usage: work done so far.
        leases: the stored parts that it reads, in the order of its canvas.
        sharing: the pages that it publishes, if its pages are shared.
        moves: K/V that are still to be copied from the store before its first pass.
        reported: whether anything but its start has been reported.
        closing: the result is reported, and one more pass completes a page for other requests.
        request: the request as it was given.
        owner: whose turn it takes.
        canvases: how many it has.
        ids: its name.
        decoder: which positions are denoised next.
        trace: tokens that it has transferred.
        end: what is known of the end of its response.
        released: it has ended, and owns nothing any more.
    """

    pending: PendingRequest
    policy: CachePolicy
    layers: int
    branches: tuple[CanvasState, ...]
    owned: list[PageRange]
    usage: Usage
    leases: tuple[Lease, ...] = ()
    sharing: PageSharing | None = None
    moves: list[Move] = field(default_factory=list)
    closing: bool = False
    request: Request = field(init=False)
    owner: Owner = field(init=False)
    canvases: int = field(init=False)
    ids: tuple[str, ...] = field(init=False)
    decoder: Decoder = field(init=False)
    trace: list[Transfer] = field(default_factory=list)
    end: ResponseEnd = field(init=False)
    reported: bool = False
    released: bool = False
    _template: Template = field(init=False)  # of the response
    _unpadded: Mask | None = None  # [T], the positions that must not hold padding, where there are any
    _given: int = field(init=False)  # leading response tokens that were final from the start
    _first_settled: float | None = None  # seconds from its arrival to the first final response token
    _items: Items | None = None  # the next pass, once it is planned
    _tally: Tally = field(init=False)  # of that pass
    _standing: _Standing | None = None  # what the policy planned last, where it serves for more than one step
    _schedule: Schedule = field(init=False)
    _reads_too: Extra | None = field(init=False)  # what the policy has read of every row
    _residual: _Residual | None = None
    _clock: int = 0  # steps in which the unconditional canvas took part
    _foreseeable: bool = field(init=False)  # whether any of its passes can be planned before the last one is read
    _pass_index: int = 0  # passes since the step began
    _left_out: int = 0  # of these, fill passes in which the unconditional canvas took no part
    _last_pass: LastPass = field(default_factory=LastPass)
    _extra: NDArray[np.float32] | None = None  # [predicted], read of the pass that ends
    _predicted: NDArray[np.int64] = field(init=False)  # [T], the token that was last predicted at each position
    _logprobs: PredictedLogprobs | None = field(init=False)
    _replay: Replay | None = field(init=False)
    _reads: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of the slots of its `Reading`
    _fill_passes: list[tuple[LayerWork, ...]] = field(default_factory=list)  # of this step, where drafts are wanted

    def __post_init__(self) -> None:
        canvas = self.branches[0].canvas
        self.request = self.pending.request
        self.owner, self.canvases, self.ids = self.request.owner, self.pending.canvases, (self.request.id,)
        traits = self.policy.traits
        self._schedule, self._reads_too = traits.schedule, traits.reads
        self.decoder = self.pending.decoding.decoder(canvas, self._schedule.idle_passes)
        self._predicted = canvas.tokens.copy()
        asked = self.request
        by_host = (asked.constraint, asked.reading, asked.replay)
        self._foreseeable = traits.by_clock and not asked.drafts and all(each is None for each in by_host)
        self._template, self._given = asked.response, canvas.settled_lead
        formed = asked.formed or asked.constraint is not None or asked.reading is not None
        self.end = ResponseEnd(canvas, self._template, self.pending.stops, formed=formed)
        if self._template.unpadded.any():
            self._unpadded = np.zeros(len(canvas), dtype=np.bool_)
            self._unpadded[canvas.prompt : canvas.end] = self._template.unpadded
        self._logprobs = (
            None if self.request.top_logprobs is None else PredictedLogprobs(len(canvas), self.request.top_logprobs)
        )
        self._replay = (
            None if self.request.replay is None else Replay(self.request.replay, self.pending.decoding.total_steps)
        )

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

    def enter(self, loop: RequestLoop) -> bool:
        """See `Member`: the plan stands in its ledgers, and what it reads at other positions is copied."""
        return loop.guarded(self, POLICY, self.admit) and (
            not self.moves or loop.guarded(self, MOVING, loop.move, self)
        )

    def join(self, batch: RequestList) -> None:
        """See `Member`."""
        batch.requests.append(self)

    def ran(self, loop: RequestLoop, scores: Scores) -> None:
        """See `Member`: what was predicted is transferred."""
        loop.settle(self, scores)

    def failed(self, loop: RequestLoop, error: Exception) -> None:
        """See `Member`: it ends."""
        loop.fail(self, error, PASS)

    def items(self) -> Items:
        """What the next pass computes: a plan for each canvas that takes part.

        Each pass is planned once, however long it waits for its turn.
        """
        if self._items is None:
            again = self.repeated(self.decoder, self.branches[0].canvas.noisy)
            if again is not None:
                self._items = ((self.branches[0], again),)
            else:
                self._items = self._planned()
                self._tally = self._counted(self._items)
        return self._items

    def _planned(self) -> Items:
        first, decoder = self.branches[0], self.decoder
        if self.closing:
            return ((first, self._closing_plan(first)),)
        plan = self._plan(first, decoder.step)
        if self.request.reading is not None and not plan.fills:
            # What is read is a matter of the request: the first pass of a policy may be made to predict less.
            plan = replace(plan, predict=first.canvas.noisy.copy(), commit=None)
        if len(self.branches) == 1 or not self.policy.guides(decoder.step):
            return ((first, plan),)
        second = self.branches[1]
        other = self._plan(second, self._clock)
        if plan.fills and not other.fills:
            return ((first, plan),)  # what it has to fill alone: the other canvas has nothing to do until it predicts
        if other.fills and not plan.fills:
            raise PlanError("the unconditional canvas has a fill pass where the other one predicts")
        # Canvases with clocks of their own still predict, and commit, the same positions.
        return (first, plan), (second, replace(other, predict=plan.predict, commit=plan.commit))

    def repeated(self, decoder: Decoder, noisy: Mask) -> Plan | None:
        """The plan of the step of `decoder` where the last plan repeats in it; else None. Positions may be `noisy`."""
        last = self._standing
        if last is None or self.closing or decoder.cut is not None:
            return None
        since = decoder.step - last.step
        if since > last.repeats or decoder.block_step - last.block_step != since or decoder.block != last.block:
            return None
        return last.plan.repeated(last.block, noisy)

    def _counted(self, items: Items) -> Tally:
        cost = sum(plan.cost for _, plan in items)
        first, live = items[0][0], items[0][1].spans[-1].rows
        lent = first.prefix.parts if self.leases and first.prefix is not None else ()
        return Tally(
            cost=cost,
            rows=sum(plan.widest for _, plan in items),
            saved=sum(len(branch.canvas) for branch, _ in items) * self.layers - cost,
            refreshes=any(plan.refreshes for _, plan in items),
            refreshes_prefix=any(live[part.start : part.stop].any() for part in lent),
        )

    @property
    def plan(self) -> Plan:
        """The conditional canvas' plan."""
        return self.items()[0][1]

    @property
    def tally(self) -> Tally:
        """What the next pass counts as."""
        if self._items is None:
            self.items()
        return self._tally

    @property
    def cost(self) -> int:
        """Row-layers of the next pass."""
        return self.tally.cost

    @property
    def widest(self) -> int:
        """Most rows of the next pass in any layer."""
        return self.tally.rows

    @property
    def predicted(self) -> int:
        """Number of positions that the next pass predicts."""
        return len(self.plan.predicted)

    @property
    def refreshes(self) -> bool:
        """Whether the next pass fills or renews what its policy caches, on any of its canvases."""
        return self.tally.refreshes

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

    @property
    def transfers(self) -> Transfers | None:
        """What is known of the positions that the next pass transfers; None where the host must choose."""
        if not self._foreseeable or self.closing:
            return None
        plan = self.plan
        if plan.fills:
            return plan.predicted[:0]
        known = self.decoder.transfers
        return known if known is None or plan.commit is None else plan.commit.nonzero()[0]

    @property
    def candidates(self) -> Candidates:
        """The positions that the next pass predicts, as the device sees them."""
        places = [branch.places for branch in self.branches]
        return Candidates(self.transfers, self.plan.predicted, self.decoder.block, places)

    def at(self, decoder: Decoder, plan: Plan | None = None) -> "RunningRequest":
        """A copy in the later step of `decoder`, with one canvas and the plan of that step, where that is known."""
        other = copy(self)
        other.decoder, other._pass_index = decoder, 0
        other._items = None if plan is None else ((self.branches[0], plan),)
        return other

    def take(self, step: "RunningRequest") -> None:
        """Take the pass of a copy of this request, which ran its next step (`at`), for its own."""
        predict = self.plan.predict
        self._items = tuple((branch, plan.predicting(predict)) for branch, plan in step.items())
        self._tally = step.tally

    def repeats(self, step: int) -> bool:
        """Whether the next pass is that of `step`, over the same rows as the last one."""
        return self.decoder.step == step and self.plan.again

    def revised(self, items: Sequence[tuple[CanvasState, Plan]]) -> None:
        """Take the plans with which the admitted pass runs: watching attention, or a failure, may change them."""
        self._items = tuple(items)
        self._tally = self._counted(self._items)

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

    def _plan(self, branch: CanvasState, step: int) -> Plan:
        view = self._view(branch, step)
        plan = self.policy.plan(view)
        plan = plan if plan.sees is view.sees else replace(plan, sees=view.sees)
        if self.decoder.cut is not None:
            self._standing = None
            return plan.below(self.decoder.cut, branch.memo)
        repeats = self.policy.repeats(view) if len(self.branches) == 1 else 0
        self._standing = _Standing(plan, repeats, step, view.block_step, view.block) if repeats else None
        return plan

    def _closing_plan(self, branch: CanvasState) -> Plan:
        # After a stop token the decoder stands at the next block, so the last one is where the settled blocks end.
        stop = 0 if self.sharing is None else self.sharing.ready()
        block = range(stop - self.pending.decoding.block, stop)
        view = replace(self._view(branch, self.decoder.step), block=block)
        plan = self.policy.closing(view)
        if plan is None:
            raise PlanError("a policy that shares pages has no plan for the last block's commit pass")
        return replace(plan, sees=view.sees)

    def _view(self, branch: CanvasState, step: int) -> View:
        decoder, canvas = self.decoder, branch.canvas
        last = self._last_pass
        return View(
            layers=self.layers,
            step=step,
            block_step=decoder.block_step,
            block=decoder.block,
            prompt=canvas.prompt,
            noisy=canvas.noisy,
            settled=canvas.settled,
            prefix=branch.prefix,
            pass_index=self._pass_index - (0 if branch is self.branches[0] else self._left_out),
            shift=branch.shift,
            sees=decoder.sees,
            response=canvas.end,
            stop=self.end.stop,
            seed=self.pending.decoding.seed,
            steps=self.pending.decoding.scheduled_steps,
            decoding=_facts(decoder),
            last_pass=last if branch.tracker is None else replace(last, tracked=branch.tracker.tokens),
            memo=branch.memo,
            weights=branch.weights,
        )


_NO_FACTS = StepFacts()


def _facts(decoder: Decoder) -> StepFacts:
    order, touched, fresh = decoder.order, decoder.touched, decoder.fresh
    return _NO_FACTS if order is None and touched is None and fresh is None else StepFacts(order, touched, fresh)
