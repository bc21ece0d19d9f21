"""A request that runs: its canvases, its decoding state, and what it has cost so far."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from remask.core.plan import LastPass, Plan, StepFacts, View
from remask.core.request import Draft, FinishReason, Result, Transfer, Usage
from remask.core.work import LayerWork, layer_work
from remask.engine.canvas_state import CanvasState
from remask.engine.pending import PendingRequest
from remask.engine.request import Request
from remask.engine.sharing import PageSharing
from remask.engine.stops import StopScan
from remask.errors import PlanError
from remask.policies.base import CachePolicy
from remask.sampling.decoder import Decoder
from remask.sampling.score import Guidance, Residual, RowGroup
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


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request with its place in memory.

    Attributes:
        pending: what it was before it began.
        policy: the cache policy that plans its passes.
        layers: the model's layers.
        branches: the conditional canvas and, under guidance, the unconditional one.
        owned: pages that it holds references to, beside those of its lease.
        usage: work done so far.
        lease: the shared prefix that it reads, if any.
        sharing: the pages that it publishes, if its pages are shared.
        reported: whether anything but its start has been reported.
        reason: why the response is complete; None while it is not.
        closing: the result is reported, and one more pass completes a page for other requests.
        decoder: which positions are denoised next.
        trace: tokens that it has transferred.
    """

    pending: PendingRequest
    policy: CachePolicy
    layers: int
    branches: tuple[CanvasState, ...]
    owned: list[PageRange]
    usage: Usage
    lease: Lease | None = None
    sharing: PageSharing | None = None
    closing: bool = False
    decoder: Decoder = field(init=False)
    trace: list[Transfer] = field(default_factory=list)
    reported: bool = False
    reason: FinishReason | None = None
    _stops: StopScan = field(init=False)
    _scanned: int = 0  # leading response tokens that `_stops` has seen
    _first_settled: float | None = None  # when the first response token became final
    _items: tuple[tuple[CanvasState, Plan], ...] | None = None  # the next pass, once it is planned
    _residual: _Residual | None = None
    _stop_written: bool = False  # whether the last step wrote a stop token
    _pass_index: int = 0  # passes since the step began
    _last_pass: LastPass = field(default_factory=LastPass)
    _predicted: NDArray[np.int64] = field(init=False)  # [T], the token that was last predicted at each position
    _reported: int = 0  # leading response tokens that `newly_settled` has returned
    _fill_passes: list[tuple[LayerWork, ...]] = field(default_factory=list)  # of this step, where drafts are wanted

    def __post_init__(self) -> None:
        canvas = self.branches[0].canvas
        self.decoder = self.pending.decoding.decoder(canvas, self.policy.traits.schedule.idle_passes)
        self._predicted = canvas.tokens.copy()
        self._stops = self.pending.stops.scan()

    @property
    def request(self) -> Request:
        """The request as it was given."""
        return self.pending.request

    @property
    def ready(self) -> bool:
        """Whether it can run: the prefix-only pass of the entry that it leases, if any, is done."""
        return self.lease is None or self.lease.entry.ready

    def items(self) -> tuple[tuple[CanvasState, Plan], ...]:
        """What the next pass computes: a plan for each canvas that takes part.

        Each pass is planned once, however long it waits for its turn.
        """
        if self._items is None:
            first = self.branches[0]
            plan = self._closing_plan(first) if self.closing else self._plan(first, self.decoder.step)
            self._items = ((first, plan),)
            if len(self.branches) == 2 and self.policy.guides(self.decoder.step):
                second = self.branches[1]
                other = self._plan(second, second.clock)
                # Canvases with clocks of their own still predict the same positions.
                self._items = ((first, plan), (second, replace(other, predict=plan.predict)))
        return self._items

    def prepare(self) -> None:
        """Plan the next pass, and read of the plan what the scheduler needs."""
        _ = self.cost, self.refreshes

    @property
    def plan(self) -> Plan:
        """The conditional canvas' plan."""
        return self.items()[0][1]

    @property
    def cost(self) -> int:
        """Row-layers of the next pass."""
        return sum(plan.cost for _, plan in self.items())

    @property
    def predicted(self) -> int:
        """Number of positions that the next pass predicts."""
        return int(self.plan.predict.sum())

    @property
    def saved(self) -> int:
        """Row-layers of the canvases in the next pass that it does not compute."""
        return sum(len(branch.canvas) * self.layers for branch, _ in self.items()) - self.cost

    @property
    def refreshes(self) -> bool:
        """Whether the next pass fills or renews what its policy caches, on any of its canvases."""
        return any(plan.refreshes for _, plan in self.items())

    @property
    def refreshes_prefix(self) -> bool:
        """Whether the next pass computes rows of the leased prefix, above the boundary."""
        if self.lease is None:
            return False
        return bool(self.plan.spans[-1].rows[: len(self.lease.entry)].any())

    def admit(self) -> None:
        """Enter the next pass into the ledgers. Raises `PlanError` where a policy planned what cannot be run."""
        if self.plan.fills and self._pass_index > len(self.branches[0].canvas):
            raise PlanError("a step has more fill passes than the canvas has positions, and would never end")
        if len(self.items()) < len(self.branches) and self.predicted and self._residual is None:
            raise PlanError("the unconditional canvas is left out before any step has run it, so there is no guidance")
        for branch, plan in self.items():
            branch.admit(plan)

    def ran(self, items: Sequence[tuple[CanvasState, Plan]]) -> None:
        """Take the plans with which the admitted pass runs: watching attention, or a failure, may change them."""
        self._items = tuple(items)

    def rows(self, at: int) -> RowGroup | None:
        """How its logits are read if they begin at row `at` of the pass; None where it predicts nothing."""
        count = self.predicted
        if count == 0:
            return None
        positions = np.flatnonzero(self.plan.predict)
        group = self.decoder.group(slice(at, at + count), positions)
        if len(self.branches) == 1:
            return group
        both = len(self.items()) == 2
        return replace(
            group,
            guide=slice(at + count, at + 2 * count) if both else None,
            residual=None if both or self._residual is None else self._residual.at(positions),
            keep=Guidance() if both and not self.policy.guides(self.decoder.step + 1) else None,
            cfg_scale=self.request.params.cfg_scale,
        )

    def scored(self, group: RowGroup) -> None:
        """Keep the guidance of this pass where the next step runs without the unconditional canvas."""
        if group.keep is not None:
            self._residual = _Residual(np.flatnonzero(self.plan.predict), group.keep)

    def draft(self, tokens: NDArray[np.float32], confidence: NDArray[np.float32]) -> Draft:
        """What the pass in `plan` predicted, before any of it is transferred; arrays are [predicted]."""
        return Draft(
            step=self.decoder.step,
            positions=tuple(np.flatnonzero(self.plan.predict).tolist()),
            token_ids=tuple(tokens.astype(np.int64).tolist()),
            confidences=tuple(confidence.tolist()),
            passes=(*self._fill_passes, self._layer_work()),
        )

    def apply(self, tokens: NDArray[np.int64], confidence: NDArray[np.float32]) -> Transfer | None:
        """End the pass, and transfer what the plan or the sampler chooses; None where nothing is transferred.

        `tokens` and `confidence` are [predicted].
        """
        plan = self.plan
        self._count_pass(plan)
        clocks = [branch for branch, _ in self.items()]
        self._items = None
        if self.sharing is not None:
            self.sharing.computed(plan, self.sharing.ready())
        if plan.fills:
            self._pass_index += 1
            return None
        for branch in clocks:
            branch.clock += 1
        positions = np.flatnonzero(plan.predict)
        self._last_pass = LastPass(positions, tokens, confidence)
        transfer = self._write(*self._choose(plan, positions, tokens, confidence))
        written = () if transfer is None else transfer.token_ids
        self._stop_written = not self.pending.stops.token_ids.isdisjoint(written)
        if self._first_settled is None and self.branches[0].canvas.settled_lead:
            self._first_settled = time.perf_counter()
        self._pass_index = 0
        self._fill_passes.clear()
        self.decoder.advance()
        self.usage.steps, self.usage.correction_steps = self.decoder.step, self.decoder.corrections
        return transfer

    def check_end(self) -> None:
        """Set `reason` where the response is complete. Settled tokens never change, so a settled stop can end it."""
        finished = self.decoder.finished
        inside = self.decoder.block_step > 0 and not finished
        may_stop = not inside or self.pending.decoding.ends_within(stop_written=self._stop_written)
        if may_stop and self._stop_at() is not None:
            self.reason = "stop"
        elif finished or (inside and may_stop and self._stop_behind()):
            self.reason = "length"

    def close(self) -> bool:
        """Whether one more pass, over the last block, completes a page for other requests. That pass comes next."""
        if self.sharing is None or self.closing:
            return False
        self.closing = self.sharing.would_complete(self.sharing.ready())
        return self.closing

    def newly_settled(self) -> tuple[int, ...]:
        """Response tokens that have become final, with no gap before them, since the last call."""
        canvas, begin = self.branches[0].canvas, self._reported
        self._reported = canvas.settled_lead
        return tuple(canvas.response[begin : self._reported].tolist())

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        """The result. A cancelled or failed request has no tokens: a part of a canvas is not a response."""
        tokens: tuple[int, ...] = ()
        if reason in ("stop", "length"):
            tokens = tuple(self.branches[0].canvas.response[: self._stop_at()].tolist())
        self.usage.completion_tokens = len(tokens)
        return Result(
            id=self.request.id,
            token_ids=tokens,
            finish_reason=reason,
            usage=replace(self.usage),  # a closing pass may follow, and a reported result must not change
            trace=tuple(self.trace),
            first_settled_s=None if self._first_settled is None else self._first_settled - self.pending.arrived,
            elapsed_s=time.perf_counter() - self.pending.arrived,
            error=error,
        )

    def _count_pass(self, plan: Plan) -> None:
        if self.request.drafts and plan.fills:
            self._fill_passes.append(self._layer_work())
        self.usage.forwards += len(self.items()) if self.policy.traits.schedule.own_clocks else 1
        self.usage.row_layers += self.cost

    def _choose(
        self, plan: Plan, positions: NDArray[np.int64], tokens: NDArray[np.int64], confidence: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions that are written at the end of the step, and their tokens."""
        block = self.decoder.block
        inside = (positions >= block.start) & (positions < block.stop)
        positions, tokens, confidence = positions[inside], tokens[inside], confidence[inside]
        written = (
            self.decoder.choose(positions, tokens, confidence) if plan.commit is None else np.flatnonzero(plan.commit)
        )
        self._predicted[positions] = tokens
        return written, self._predicted[written]

    def _write(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> Transfer | None:
        edits, final = self.decoder.edited(positions), self.decoder.final(positions)
        for branch in self.branches:
            branch.canvas.write(positions, tokens)
            branch.canvas.settle(final, self.decoder.step)
        if not len(positions):
            return None
        written, edited = tuple(positions.tolist()), tuple(edits.tolist())
        self.trace.append(Transfer(self.decoder.step, written, tuple(tokens.tolist()), edited))
        return self.trace[-1]

    def _layer_work(self) -> tuple[LayerWork, ...]:
        branch = self.branches[0]
        asked = min(self.request.prefix_length, branch.canvas.prompt)
        return layer_work(self.plan, asked if branch.prefix is None else branch.prefix.length, branch.prefix)

    def _plan(self, branch: CanvasState, step: int) -> Plan:
        view = self._view(branch, step)
        return replace(self.policy.plan(view), sees=view.sees)

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
        decoder, canvas, last = self.decoder, branch.canvas, self._last_pass
        return View(
            layers=self.layers,
            step=step,
            block_step=decoder.block_step,
            block=decoder.block,
            prompt=canvas.prompt,
            noisy=canvas.noisy,
            settled=canvas.settled,
            prefix=branch.prefix,
            pass_index=self._pass_index,
            shift=branch.shift,
            sees=decoder.sees,
            response=canvas.end,
            seed=self.pending.decoding.seed,
            decoding=StepFacts(decoder.order, decoder.touched),
            last_pass=last if branch.tracker is None else replace(last, tracked=branch.tracker.tokens),
        )

    def _stop_behind(self) -> bool:
        """Whether a stop token stands behind the complete response, in the rest of its block, with no noise before."""
        canvas = self.branches[0].canvas
        if canvas.noisy[: canvas.end].any():
            return False
        rest = canvas.noisy[canvas.end :]
        lead = int(rest.argmax()) if rest.any() else len(rest)
        return not self.pending.stops.token_ids.isdisjoint(canvas.tokens[canvas.end : canvas.end + lead].tolist())

    def _stop_at(self) -> int | None:
        """Length of the response that the first honoured stop leaves, or None where none has settled yet."""
        canvas, begin = self.branches[0].canvas, self._scanned
        self._scanned = canvas.settled_lead
        self._stops.push(canvas.response[begin : self._scanned].tolist())
        return self._stops.end
