"""Planning the passes of a request: it asks the policy, and repeats a plan for as long as the policy says."""

from collections.abc import Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from typing import Self, TypeAlias

from remask.engine.canvas_state import CanvasState
from remask.engine.ending import ResponseEnd
from remask.engine.pending import PendingRequest
from remask.engine.placement import Claim
from remask.engine.request import Request
from remask.errors import PlanError
from remask.plan.plan import LastPass, Plan, StepFacts, View
from remask.plan.spans import Mask, Positions
from remask.policies.base import CachePolicy
from remask.readers.base import Reader, Start
from remask.readers.own import readers_of
from remask.sampling.decoder import Decoder, Transfers, canvas_step

CanvasPlans: TypeAlias = tuple[tuple[CanvasState, Plan], ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """What a pass of a member costs.

    Attributes:
        cost: row-layers that it computes, drafts included.
        rows: the largest number of rows in any layer, drafts included.
        forwards: passes in `Usage.forwards`.
        saved: row-layers of its canvases that it does not compute.
        refreshes: it fills or renews the policy's cache, on any of its canvases.
        refreshes_prefix: it computes rows of the leased prefix, above the boundary.
    """

    cost: int
    rows: int
    forwards: int = 1
    saved: int = 0
    refreshes: bool = False
    refreshes_prefix: bool = False

    @classmethod
    def of(cls, running: "PlannedRequest", items: CanvasPlans) -> "Tally":
        """The cost of the pass over `items` of a request. Those beyond its canvases are drafts."""
        own, claim, (first, plan) = items[: len(running.branches)], running.claim, items[0]
        live, prefix = plan.spans[-1].rows, first.prefix
        leased = prefix.parts if claim.leases and prefix is not None else ()
        return cls(
            cost=sum(plan.cost for _, plan in items),
            rows=sum(plan.widest for _, plan in items),
            forwards=len(own) if running.policy.traits.schedule.own_clocks else 1,
            saved=sum(len(branch.canvas) * plan.layers - plan.cost for branch, plan in own),
            refreshes=any(plan.refreshes for _, plan in own),
            refreshes_prefix=any(live[part.start : part.stop].any() for part in leased),
        )


@dataclass(frozen=True, slots=True)
class _Standing:
    """A plan of `step` that repeats in the next `repeats` steps; `block_step` is the number of `step` in its block."""

    plan: Plan
    repeats: int
    step: int
    block_step: int
    block: range


@dataclass(slots=True)
class _Count:
    """Counts of passes that the decoder does not know: those within a step, and those of the unconditional canvas.

    Attributes:
        paired: steps in which the unconditional canvas took part.
        passes: passes since the step began.
        left_out: fill passes of the step in which the unconditional canvas took no part.
    """

    paired: int = 0
    passes: int = 0
    left_out: int = 0


@dataclass(slots=True, eq=False)
class PlannedRequest:
    """A request with its place in memory, and the plan of its next pass.

    Attributes:
        pending: what it was before it began.
        policy: the cache policy that plans its passes.
        branches: the conditional canvas and, under guidance, the unconditional one.
        claim: its pages and leases.
        closing: the result is reported, and one more pass completes a page for other requests.
        decoder: knows which positions are denoised next.
        end: looks for the end of the response.
        readers: its readers.
        tally: the cost of the next pass, once that is planned.
    """

    pending: PendingRequest
    policy: CachePolicy
    branches: tuple[CanvasState, ...]
    claim: Claim
    vocab: InitVar[int]
    before: InitVar["PlannedRequest | None"]
    closing: bool = field(init=False, default=False)
    decoder: Decoder = field(init=False)
    end: ResponseEnd = field(init=False)
    readers: tuple[Reader, ...] = field(init=False)
    tally: Tally = field(init=False)
    _foreseeable: bool = field(init=False)  # whether passes can be planned before the last one is read
    _items: CanvasPlans | None = field(init=False, default=None)  # the next pass, once it is planned
    _standing: _Standing | None = field(init=False, default=None)  # the last plan, if it repeats
    _count: _Count = field(init=False, default_factory=_Count)
    _last_pass: LastPass = field(init=False, default_factory=LastPass)

    def __post_init__(self, vocab: int, before: "PlannedRequest | None") -> None:
        """`vocab` is the size of the model's vocabulary; `before` is the request before its canvas grew, if it has."""
        canvas, asked, decoding = self.branches[0].canvas, self.request, self.pending.decoding
        traits, response = self.policy.traits, asked.response
        self.decoder = decoding.decoder(canvas, traits.schedule.idle_passes)
        if before is not None:
            self.end, self.readers = before.end, before.readers
        else:
            self.end = ResponseEnd(canvas, response, self.pending.stops, formed=asked.formed)
            start = Start(canvas, response, decoding.total_steps, vocab, asked.readers)
            self.readers = readers_of(start, self.decoder, self.policy, asked.params)
        readers = (*asked.readers, *self.readers)
        self._foreseeable = traits.by_clock and all(reader.foreseeable for reader in readers)

    @property
    def request(self) -> Request:
        """The request as it was given."""
        return self.pending.request

    def items(self) -> CanvasPlans:
        """The next pass: the canvases that take part, each with its plan.

        A pass is planned once, however many steps it waits.
        """
        if self._items is None:
            again = self.repeated(self.decoder, self.branches[0].canvas.noisy)
            if again is not None:
                self._items = ((self.branches[0], again),)
            else:
                self._items = self._planned()
                self.tally = Tally.of(self, self._items)
        return self._items

    def _planned(self) -> CanvasPlans:
        first = self.branches[0]
        if self.closing:
            # After a stop token the decoder stands at the next block, so the last one is where the settled blocks end.
            stop = 0 if self.claim.shares is None else self.claim.shares.ready()
            last = range(stop - self.pending.decoding.block, stop)
            view = replace(self._view(first, canvas_step(self.decoder)), block=last)
            return ((first, _closing_plan(self.policy, view)),)
        plan = self._plan(first, canvas_step(self.decoder))
        if self.readers and not plan.fills:
            for reader in self.readers:
                predict = reader.predicts(first.canvas.noisy)
                if predict is not None:
                    plan = replace(plan, predict=predict, commit=None)
        if len(self.branches) == 1 or not self.policy.guides(canvas_step(self.decoder)):
            return ((first, plan),)
        second = self.branches[1]
        other = self._plan(second, self._count.paired)
        if plan.fills and not other.fills:
            return ((first, plan),)  # a fill pass of one canvas: the other has nothing to do until both predict
        if other.fills and not plan.fills:
            raise PlanError("the unconditional canvas has a fill pass where the other one predicts")
        # Canvases with clocks of their own still predict, and commit, the same positions.
        return (first, plan), (second, replace(other, predict=plan.predict, commit=plan.commit))

    def repeated(self, decoder: Decoder, noisy: Mask) -> Plan | None:
        """The last plan for the step of `decoder`, if it repeats there; else None. `noisy` are the open positions."""
        last = self._standing
        if last is None or self.closing or decoder.cut is not None:
            return None
        since = decoder.step - last.step
        if since > last.repeats or decoder.block_step - last.block_step != since or decoder.block != last.block:
            return None
        return last.plan.repeated(last.block, noisy)

    @property
    def plan(self) -> Plan:
        """The conditional canvas' plan."""
        return self.items()[0][1]

    @property
    def positions(self) -> Positions:
        """The positions whose rows of the next pass are read, int64."""
        return self.plan.predicted

    @property
    def transfers(self) -> Transfers | None:
        """The positions that the next pass transfers, or how they are ranked; None where the host must choose."""
        if not self._foreseeable or self.closing:
            return None
        plan = self.plan
        if plan.fills:
            return plan.predicted[:0]
        known = self.decoder.transfers
        return known if known is None or plan.commit is None else plan.commit.nonzero()[0]

    def at(self, decoder: Decoder, plan: Plan | None = None) -> Self:
        """A copy of the request in the later step of `decoder`, with the plan of that step if it is known."""
        other = copy(self)
        other.decoder, other._count = decoder, replace(self._count, passes=0)
        other._items = None if plan is None else ((self.branches[0], plan),)
        return other

    def revised(self, items: Sequence[tuple[CanvasState, Plan]]) -> None:
        """Replace the plans of the admitted pass: hooks and repeats after a failure may change them."""
        self._items = tuple(items)
        self.tally = Tally.of(self, self._items)

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

    def _view(self, branch: CanvasState, step: int) -> View:
        decoder, canvas = self.decoder, branch.canvas
        return View(
            layers=branch.ledger.layers,
            step=step,
            block_step=decoder.block_step,
            block=decoder.block,
            prompt=canvas.prompt,
            noisy=canvas.noisy,
            settled=canvas.settled,
            prefix=branch.prefix,
            pass_index=self._count.passes - (0 if branch is self.branches[0] else self._count.left_out),
            shift=branch.shift,
            sees=decoder.sees,
            response=canvas.end,
            stop=self.end.stop,
            seed=self.pending.decoding.seed,
            steps=self.pending.decoding.scheduled_steps,
            decoding=_facts(decoder),
            last_pass=self._last_pass,
            memo=branch.memo,
            hook_output=branch.hook_output,
        )


def _closing_plan(policy: CachePolicy, view: View) -> Plan:
    plan = policy.closing(view)
    if plan is None:
        raise PlanError("a policy that shares pages has no plan for the last block's commit pass")
    return replace(plan, sees=view.sees)


_NO_FACTS = StepFacts()


def _facts(decoder: Decoder) -> StepFacts:
    order, touched, fresh = decoder.order, decoder.touched, decoder.fresh
    return _NO_FACTS if order is None and touched is None and fresh is None else StepFacts(order, touched, fresh)
