"""The passes of a request: what its policy plans for its canvases, and for how many steps a plan holds."""

from collections.abc import Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from typing import Self, TypeAlias

import numpy as np

from remask.engine.canvas_state import CanvasState
from remask.engine.drafting import same
from remask.engine.ending import ResponseEnd
from remask.engine.pending import PendingRequest
from remask.engine.placement import Claim
from remask.engine.request import Request
from remask.errors import PlanError
from remask.plan.plan import LastPass, Plan, StepFacts, View
from remask.plan.spans import Mask, Positions
from remask.policies.base import CachePolicy, Schedule
from remask.readers.base import Reader, Start
from remask.readers.own import readers_of
from remask.sampling.choice import Candidates
from remask.sampling.decoder import Decoder, Transfers

Items: TypeAlias = tuple[tuple[CanvasState, Plan], ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """What a pass of a request counts as.

    Attributes:
        forwards: passes that it counts as in usage; 0 of one that was run as a draft before.
        cost: row-layers that it computes.
        rows: most rows that it has in any layer.
        saved: row-layers of its canvases that it does not compute.
        refreshes: it fills or renews what the policy caches, on any of its canvases.
        refreshes_prefix: it computes rows of the leased prefix, above the boundary.
    """

    forwards: int
    cost: int
    rows: int
    saved: int
    refreshes: bool
    refreshes_prefix: bool


_DRAFTED = Tally(0, 0, 0, 0, refreshes=False, refreshes_prefix=False)


@dataclass(frozen=True, slots=True)
class _Standing:
    """A plan that `repeats` in as many steps after `step`, which was the one numbered `block_step` of its block."""

    plan: Plan
    repeats: int
    step: int
    block_step: int
    block: range


@dataclass(slots=True)
class _Count:
    """How far a request is between the steps that its decoder counts.

    Attributes:
        paired: steps in which the unconditional canvas took part.
        passes: passes since the step began.
        left_out: of these, fill passes in which the unconditional canvas took no part.
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
        claim: what it holds in memory.
        closing: the result is reported, and one more pass completes a page for other requests.
        decoder: which positions are denoised next.
        end: what is known of the end of its response.
        readers: what is read of its predicted rows.
    """

    pending: PendingRequest
    policy: CachePolicy
    branches: tuple[CanvasState, ...]
    claim: Claim
    vocab: InitVar[int]
    closing: bool = field(init=False, default=False)
    decoder: Decoder = field(init=False)
    end: ResponseEnd = field(init=False)
    readers: tuple[Reader, ...] = field(init=False)
    _schedule: Schedule = field(init=False)
    _foreseeable: bool = field(init=False)  # whether any of its passes can be planned before the last one is read
    _items: Items | None = field(init=False, default=None)  # the next pass, once it is planned
    _tally: Tally = field(init=False)  # of that pass
    _standing: _Standing | None = field(init=False, default=None)  # the last plan, where it serves for more steps
    _count: _Count = field(init=False, default_factory=_Count)
    _last_pass: LastPass = field(init=False, default_factory=LastPass)

    def __post_init__(self, vocab: int) -> None:
        """`vocab` is how many tokens the model has."""
        canvas, asked, decoding = self.branches[0].canvas, self.request, self.pending.decoding
        traits, response = self.policy.traits, asked.response
        self._schedule = traits.schedule
        self.decoder = decoding.decoder(canvas, self._schedule.idle_passes)
        self._foreseeable = traits.by_clock and all(reader.foreseeable for reader in asked.readers)
        self.end = ResponseEnd(canvas, response, self.pending.stops, formed=asked.formed)
        start = Start(canvas, response, decoding.total_steps, vocab, asked.readers)
        self.readers = readers_of(start, self.decoder, self.policy, asked.params.cfg_scale)

    @property
    def request(self) -> Request:
        """The request as it was given."""
        return self.pending.request

    @property
    def layers(self) -> int:
        """The model's layers."""
        return self.branches[0].ledger.layers

    def items(self) -> Items:
        """What the next pass computes: a plan for each canvas that takes part, drafts last.

        Each pass is planned once, however long it waits for its turn.
        """
        if self._items is None:
            again = self.repeated(self.decoder, self.branches[0].canvas.noisy)
            if again is not None:
                self._items = ((self.branches[0], again),)
            else:
                self._items = self._planned()
            drafting = self.claim.drafting
            if drafting is not None and self._standing is not None:
                (first, plan), *_ = self._items
                drafts = drafting.propose(first, self.decoder, self._last_pass, plan, self.repeated)
                self._items = (*self._items, *drafts)
            if again is None or drafting is not None:
                self._tally = self._counted(self._items)
        return self._items

    def undrafted(self) -> None:
        """Leave the drafts out of the next pass."""
        if self._items is not None and self.claim.drafting is not None:
            self.revised(self._items[:1])

    def drafted(self, draft: CanvasState) -> bool:
        """Whether `draft`, which the last pass computed, is the canvas as it is now. Its pass is the next one then."""
        first, decoder = self.branches[0], self.decoder
        if decoder.finished or not same(draft.canvas, first.canvas, decoder.block):
            return False
        again = self.repeated(decoder, first.canvas.noisy)
        if again is not None:
            self._items, self._tally = ((first, again),), _DRAFTED
        return again is not None

    def _planned(self) -> Items:
        first, decoder = self.branches[0], self.decoder
        if self.closing:
            return ((first, self._closing_plan(first)),)
        plan = self._plan(first, decoder.step)
        if self.readers and not plan.fills:
            for reader in self.readers:
                predict = reader.predicts(first.canvas.noisy)
                if predict is not None:
                    plan = replace(plan, predict=predict, commit=None)
        if len(self.branches) == 1 or not self.policy.guides(decoder.step):
            return ((first, plan),)
        second = self.branches[1]
        other = self._plan(second, self._count.paired)
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
        cost, own = sum(plan.cost for _, plan in items), items[: len(self.branches)]
        first, live = items[0][0], items[0][1].spans[-1].rows
        lent = first.prefix.parts if self.claim.leases and first.prefix is not None else ()
        return Tally(
            forwards=len(own) if self._schedule.own_clocks else 1,
            cost=cost,
            rows=sum(plan.widest for _, plan in items),
            saved=sum(len(branch.canvas) * self.layers - plan.cost for branch, plan in own),
            refreshes=any(plan.refreshes for _, plan in own),
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
    def paired(self) -> bool:
        """Whether the unconditional canvas takes part in the next pass."""
        return len(self.branches) == 2 and len(self.items()) == 2

    @property
    def positions(self) -> Positions:
        """The positions whose rows are read of the next pass, those of drafts after the canvas' own, int64."""
        first, *others = self.items()
        if not others or self.paired:
            return first[1].predicted
        return np.concatenate([first[1].predicted, *(plan.predicted for _, plan in others)])

    @property
    def predicted(self) -> int:
        """Number of positions that are read of the next pass."""
        return len(self.plan.predicted) if self.claim.drafting is None else len(self.positions)

    @property
    def refreshes(self) -> bool:
        """Whether the next pass fills or renews what its policy caches, on any of its canvases."""
        return self.tally.refreshes

    @property
    def transfers(self) -> Transfers | None:
        """What is known of the positions that the next pass transfers; None where the host must choose."""
        if not self._foreseeable or self.closing or self.claim.drafting is not None:
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
        return Candidates(self.transfers, self.positions, self.decoder.block, places)

    def at(self, decoder: Decoder, plan: Plan | None = None) -> Self:
        """A copy in the later step of `decoder`, with one canvas and the plan of that step, where that is known."""
        other = copy(self)
        other.decoder, other._count = decoder, replace(self._count, passes=0)
        other._items = None if plan is None else ((self.branches[0], plan),)
        return other

    def take(self, step: Self) -> None:
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
        shares = self.claim.shares
        stop = 0 if shares is None else shares.ready()
        block = range(stop - self.pending.decoding.block, stop)
        view = replace(self._view(branch, self.decoder.step), block=block)
        plan = self.policy.closing(view)
        if plan is None:
            raise PlanError("a policy that shares pages has no plan for the last block's commit pass")
        return replace(plan, sees=view.sees)

    def _view(self, branch: CanvasState, step: int) -> View:
        decoder, canvas = self.decoder, branch.canvas
        return View(
            layers=self.layers,
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
            told=branch.told,
        )


_NO_FACTS = StepFacts()


def _facts(decoder: Decoder) -> StepFacts:
    order, touched, fresh = decoder.order, decoder.touched, decoder.fresh
    return _NO_FACTS if order is None and touched is None and fresh is None else StepFacts(order, touched, fresh)
