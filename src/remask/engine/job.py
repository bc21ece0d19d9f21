"""A request in the engine: its canvases, its decoding state, and what it has cost so far."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.plan import Plan, View
from remask.core.request import Draft, FinishReason, Result, Transfer, Usage
from remask.core.work import LayerWork, layer_work
from remask.engine.canvas_state import CanvasState
from remask.engine.request import Request
from remask.engine.sharing import PageSharing
from remask.errors import PlanError
from remask.policies.base import CachePolicy
from remask.sampling.decoder import Decoder, Decoding
from remask.sampling.score import RowGroup
from remask.store.pages import PageRange
from remask.store.prefix import Lease

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class Job:
    """One running request. `branches` is the conditional canvas and, under guidance, the unconditional one."""

    request: Request
    policy: CachePolicy
    decoding: Decoding
    stops: frozenset[int]
    layers: int
    arrived: float
    decode: Decode | None
    usage: Usage
    branches: tuple[CanvasState, ...] = ()
    owned: list[PageRange] = field(default_factory=list)
    lease: Lease | None = None
    sharing: PageSharing | None = None
    page_keys: list[int] | None = None  # identities of the pages that the prompt fills, once they were needed
    closing: bool = False  # the result is told, one more pass runs for what is to be shared
    decoder: Decoder | None = None
    trace: list[Transfer] = field(default_factory=list)
    first_settled: float | None = None
    _items: tuple[tuple[CanvasState, Plan], ...] | None = None
    _residual: tuple[NDArray[np.int64], Tensor] | None = None  # positions, and their [positions, V]
    _pass_index: int = 0  # passes since the step began
    _predicted: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # [T], see `choose`
    _told: int = 0  # response tokens that `newly_settled` has given
    _filled: list[tuple[LayerWork, ...]] = field(
        default_factory=list
    )  # the step's fill passes, where drafts are wanted

    @property
    def ready(self) -> bool:
        """Whether the prefix-only pass that it waits for, if any, has run."""
        return self.lease is None or self.lease.entry.ready

    @property
    def branches_needed(self) -> int:
        """Canvases that run for it: two under classifier-free guidance."""
        return 2 if self.request.params.cfg_scale > 0 else 1

    def start(self, branches: tuple[CanvasState, ...], lease: Lease | None) -> None:
        """The canvases are placed in memory; decoding begins with the next step."""
        self.branches, self.lease = branches, lease
        if lease is None:
            self.policy = self.policy.without_prefix
        self.decoder = self.decoding.decoder(branches[0].canvas, self.policy.traits.idle_passes)
        self._predicted = branches[0].canvas.tokens.copy()

    def items(self) -> tuple[tuple[CanvasState, Plan], ...]:
        """What the next pass computes: a plan for each canvas that takes part.

        Planned once per pass, however often it has to wait.
        """
        if self._items is None:
            first = self.branches[0]
            assert self.decoder is not None
            plan = self._closing_plan(first) if self.closing else self._plan(first, self.decoder.step)
            self._items = ((first, plan),)
            if self._guided_now():
                second = self.branches[1]
                other = self._plan(second, second.clock)
                # Canvases with clocks of their own still predict the same positions.
                self._items = ((first, plan), (second, replace(other, predict=plan.predict)))
        return self._items

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

    def draft(self, tokens: NDArray[np.float32], confidence: NDArray[np.float32]) -> Draft:
        """What the pass in `plan` predicted, before any of it is transferred; arrays are [predicted]."""
        assert self.decoder is not None
        positions = np.flatnonzero(self.plan.predict)
        ids = tokens.astype(np.int64)
        told = Draft(self.decoder.step, *(tuple(column.tolist()) for column in (positions, ids, confidence)))
        return replace(told, passes=(*self._filled, self._work()))

    def admit(self) -> None:
        """Enter the next pass into the ledgers. Raises `PlanError` where a policy planned what cannot be run."""
        if self.plan.fills and self._pass_index > len(self.branches[0].canvas):
            raise PlanError("a step has more fill passes than the canvas has positions, and would never end")
        for branch, plan in self.items():
            branch.admit(plan)

    def ran(self, items: Sequence[tuple[CanvasState, Plan]]) -> None:
        """The pass that was admitted is over; `items` are what it came to, where plans watch attention."""
        self._items = tuple(items)

    def rows(self, at: int) -> RowGroup | None:
        """How its logits are read, when they begin at row `at` of the pass'; None where it predicts nothing."""
        assert self.decoder is not None
        count = self.predicted
        if count == 0:
            return None
        group = self.decoder.group(slice(at, at + count), np.flatnonzero(self.plan.predict))
        if len(self.branches) == 1:
            return group
        both = len(self.items()) == 2
        return replace(
            group,
            guide=slice(at + count, at + 2 * count) if both else None,
            residual=None if both else self._kept_residual(),
            cfg_scale=self.request.params.cfg_scale,
        )

    def keep_residual(self, logits: Tensor, group: RowGroup) -> None:
        """Keep the guidance' residual, conditional minus unconditional, where the next step goes without the latter."""
        assert self.decoder is not None
        if group.guide is not None and not self.policy.guides(self.decoder.step + 1):
            self._residual = (np.flatnonzero(self.plan.predict), logits[group.rows] - logits[group.guide])

    def _kept_residual(self) -> Tensor:
        assert self._residual is not None
        positions, residual = self._residual
        index = np.searchsorted(positions, np.flatnonzero(self.plan.predict))
        return residual[torch.from_numpy(index).to(residual.device, non_blocking=True)]

    def _guided_now(self) -> bool:
        assert self.decoder is not None
        return len(self.branches) == 2 and self.policy.guides(self.decoder.step)

    def apply(self, tokens: NDArray[np.int64], confidence: NDArray[np.float32]) -> Transfer | None:
        """End the pass: transfer what the plan or the sampler chooses of the predicted positions; None for nothing."""
        assert self.decoder is not None
        plan = self.plan
        clocks = [branch for branch, _ in self.items()]
        if self.request.drafts and plan.fills:
            self._filled.append(self._work())
        self.usage.forwards += len(clocks) if self.policy.traits.own_clocks else 1
        self.usage.row_layers += self.cost
        self._items = None
        if self.sharing is not None:
            self.sharing.computed(plan, self.sharing.ready())
        if plan.fills:
            self._pass_index += 1
            return None
        for branch in clocks:
            branch.clock += 1
        positions = np.flatnonzero(plan.predict)
        inside = (positions >= self.decoder.block.start) & (positions < self.decoder.block.stop)
        positions, tokens, confidence = positions[inside], tokens[inside], confidence[inside]
        written = (
            self.decoder.choose(positions, tokens, confidence) if plan.commit is None else np.flatnonzero(plan.commit)
        )
        self._predicted[positions] = tokens
        values = self._predicted[written]
        final = self.decoder.final(written)
        for branch in self.branches:
            branch.canvas.write(written, values)
            branch.canvas.settle(final, self.decoder.step)
        transfer = None
        if len(written):
            transfer = Transfer(self.decoder.step, tuple(written.tolist()), tuple(values.tolist()))
            self.trace.append(transfer)
        if self.first_settled is None and self.branches[0].canvas.settled_lead:
            self.first_settled = time.perf_counter()
        self._pass_index = 0
        self._filled.clear()
        self.decoder.advance()
        self.usage.steps, self.usage.correction_steps = self.decoder.step, self.decoder.corrections
        return transfer

    def ending(self) -> FinishReason | None:
        """Why the response is complete, or None. Settled tokens never change, so a settled stop can end it."""
        assert self.decoder is not None
        finished = self.decoder.finished
        inside = self.decoding.whole_blocks and self.decoder.block_step > 0 and not finished
        if not inside and self._stop_at() is not None:
            return "stop"
        return "length" if finished else None

    def close(self) -> bool:
        """Whether one more pass, over the last block, completes a page that other requests may read; it comes next."""
        if self.sharing is None or self.closing:
            return False
        self.closing = self.sharing.would_complete(self.sharing.ready())
        return self.closing

    def newly_settled(self) -> tuple[int, ...]:
        """Response tokens that have become final without a gap before them since this was last asked."""
        canvas, begin = self.branches[0].canvas, self._told
        self._told = canvas.settled_lead
        return tuple(canvas.response[begin : self._told].tolist())

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        """What the request came to. A cancelled or failed one has no tokens: a part of a canvas is not a response."""
        tokens: tuple[int, ...] = ()
        if reason in ("stop", "length"):
            end = self._stop_at()
            tokens = tuple(self.branches[0].canvas.response[:end].tolist())
        self.usage.completion_tokens = len(tokens)
        first = None if self.first_settled is None else self.first_settled - self.arrived
        return Result(
            self.request.id,
            tokens,
            reason,
            replace(self.usage),  # a closing pass may follow, and what was told must not change
            tuple(self.trace),
            first,
            time.perf_counter() - self.arrived,
            error,
        )

    def _closing_plan(self, branch: CanvasState) -> Plan:
        assert self.decoder is not None
        assert self.sharing is not None
        stop = self.sharing.ready()  # after a stop token the decoder stands at the next block
        block = range(stop - self.decoding.block, stop)
        view = replace(self._view(branch, self.decoder.step), block=block)
        plan = self.policy.closing(view)
        if plan is None:
            raise PlanError("a policy that shares pages has no plan for the last block's commit pass")
        return replace(plan, sees=view.sees)

    def _work(self) -> tuple[LayerWork, ...]:
        branch = self.branches[0]
        asked = min(self.request.prefix_length, branch.canvas.prompt)
        return layer_work(self.plan, asked if branch.prefix is None else branch.prefix.length, branch.prefix)

    def _plan(self, branch: CanvasState, step: int) -> Plan:
        view = self._view(branch, step)
        return replace(self.policy.plan(view), sees=view.sees)

    def _view(self, branch: CanvasState, step: int) -> View:
        assert self.decoder is not None
        return View(
            layers=self.layers,
            step=step,
            block_step=self.decoder.block_step,
            block=self.decoder.block,
            prompt=branch.canvas.prompt,
            noisy=branch.canvas.noisy,
            settled=branch.canvas.settled,
            prefix=branch.prefix,
            pass_index=self._pass_index,
            shift=branch.shift,
            order=self.decoder.order,
            sees=self.decoder.sees,
            response=branch.canvas.end,
            seed=self.decoding.seed,
            touched=self.decoder.touched,
            tracked=None if branch.tracker is None else branch.tracker.tokens,
        )

    def _stop_at(self) -> int | None:
        """Length of the response that the first honoured stop leaves, or None where none has settled yet."""
        canvas = self.branches[0].canvas
        settled = canvas.response[: canvas.settled_lead].tolist()
        end = next((index + 1 for index, token in enumerate(settled) if token in self.stops), None)
        if self.decode is not None and self.request.params.stop:
            lead = settled[:end]
            if self._stopped(lead):
                # The shortest lead that contains a stop text; texts of leads grow with them.
                low, high = 1, len(lead)
                while low < high:
                    middle = (low + high) // 2
                    low, high = (low, middle) if self._stopped(lead[:middle]) else (middle + 1, high)
                end = low
        return end

    def _stopped(self, tokens: Sequence[int]) -> bool:
        assert self.decode is not None
        text = self.decode(tokens)
        return any(stop in text for stop in self.request.params.stop)
