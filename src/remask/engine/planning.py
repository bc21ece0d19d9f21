"""The plan of a step: what the next pass of a request computes, by its policy, and which members take part.

And where the response of a request ends as tokens settle, which the next plan depends on.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from remask.engine.canvas_state import CanvasState
from remask.engine.config import EngineConfig
from remask.engine.member import CanvasPlans, Member, Tally, Turn
from remask.engine.request import Owner, PendingRequest
from remask.errors import PlanError
from remask.plan.canvas import Canvas, Hole, Template
from remask.plan.plan import LastPass, Plan, View
from remask.plan.spans import Mask
from remask.policies.base import CachePolicy
from remask.readers.base import Reader
from remask.request.result import FinishReason, Transfer
from remask.sampling.decoder import Decoder, Decoding
from remask.text.incremental import StopRule


class ResponseEnd:
    """Looks for the end of one response while its tokens settle. It reads the canvas and never writes to it.

    Settled tokens never change, so a settled stop can end a response.

    Attributes:
        stop: canvas position of the first stop token that has settled, with or without noise before it; None without.
    """

    def __init__(self, canvas: Canvas, template: Template, rule: StopRule, *, formed: bool) -> None:
        """`formed`: the response has a given form, so it is whole wherever it ends."""
        self.stop: int | None = None
        self.reason: FinishReason | None = None  # why the response is complete; None while it is not
        self.lead = 0  # leading response tokens that `settle` has returned
        self._canvas, self._template, self._rule, self._formed = canvas, template, rule, formed
        self._scan, self._stops = rule.scan(), rule.every
        self._scanned = template.tail  # leading response tokens that the scan has passed
        # Whether the canvas may hold a stop: a stop text, or a stop token that was given or written.
        tokens = canvas.tokens[canvas.prompt :].tolist()
        self._stoppable = rule.decode is not None or not self._stops.isdisjoint(tokens)

    def settle(self, transfer: Transfer | None, decoding: Decoding, decoder: Decoder) -> tuple[int, ...]:
        """Response tokens that became final since the last call, up to the first gap. Sets `reason` if it is complete.

        `transfer` is that of the pass; its tokens are on the canvas, and `decoder` has gone on to the next step.
        """
        stops = self._stops
        stop_written = bool(stops) and transfer is not None and not stops.isdisjoint(transfer.token_ids)
        if stop_written:
            self._stoppable = True
            self.stop = self._settled_stop()
        canvas, begin = self._canvas, self.lead
        self.lead = lead = canvas.settled_lead
        settled = tuple(canvas.response[begin:lead].tolist()) if lead > begin else ()
        finished = decoder.finished
        complete = finished and not decoding.can_grow
        if self._stoppable:
            inside = decoder.block_step > 0 and not finished
            may_stop = not inside or decoding.may_stop_within_block(stop_written=stop_written)
            if may_stop and self.length(lead) is not None:
                self.reason = "stop"
                return settled
            complete = complete or (inside and may_stop and self._stop_behind())
        if complete:
            self.reason = "stop" if self._whole() else "length"
        return settled

    def length(self, lead: int) -> int | None:
        """Length of the response up to its first stop in the hole at the end; None: `lead` tokens have none."""
        begin = self._scanned
        if lead > begin and self._stoppable:
            self._scanned = lead
            self._scan.push(self._canvas.response[begin:lead].tolist())
        return None if self._scan.end is None else self._template.tail + self._scan.end

    def _settled_stop(self) -> int | None:
        canvas, tail = self._canvas, self._canvas.prompt + self._template.tail
        stops = np.fromiter(self._stops, dtype=np.int64)
        settled = np.isin(canvas.tokens[tail : canvas.end], stops) & ~canvas.noisy[tail : canvas.end]
        return tail + int(settled.argmax()) if settled.any() else None

    def _stop_behind(self) -> bool:
        """Whether a stop token follows the complete response in the rest of its block, with no noise before it."""
        canvas = self._canvas
        if self.lead < canvas.end - canvas.prompt:
            return False
        rest = canvas.noisy[canvas.end :]
        lead = int(rest.argmax()) if rest.any() else len(rest)
        return not self._stops.isdisjoint(canvas.tokens[canvas.end : canvas.end + lead].tolist())

    def _whole(self) -> bool:
        """Whether the response ended by itself, and not because its places were used up."""
        return self._formed or not any(hole.variable and self._full(hole) for hole in self._template.holes)

    def _full(self, hole: Hole) -> bool:
        """Whether a hole holds neither padding nor a stop."""
        tokens = self._canvas.response[hole.start : hole.stop].tolist()
        stops = self._rule.scan()
        stops.push(tokens)
        return stops.end is None and not any(token in self._template.padding for token in tokens)


@dataclass(slots=True)
class Standing:
    """A plan of `step` that repeats in the next `repeats` steps; `block_step` is the number of `step` in its block."""

    plan: Plan
    repeats: int
    step: int
    block_step: int
    block: range
    tally: Tally | None = None  # what each of these passes costs


@dataclass(slots=True)
class PassPlanner:
    """Plans the passes of one request."""

    pending: PendingRequest  # what the request was before it began
    policy: CachePolicy
    end: ResponseEnd  # knows where the response ends
    readers: Sequence[Reader]  # may say what is predicted
    first_step: int = 0  # the step at which the canvas got its present length, from which the policy counts
    standing: Standing | None = None  # the last plan, if it repeats
    last_pass: LastPass = field(default_factory=LastPass)  # what the last pass predicted
    passes: int = 0  # passes since the step began
    paired: int = 0  # steps in which the unconditional canvas of guidance took part
    left_out: int = 0  # fill passes of the step in which the unconditional canvas took no part

    def repeated(self, decoder: Decoder, noisy: Mask) -> Plan | None:
        """The last plan for the step of `decoder`, if it repeats there; else None. `noisy` are the open positions."""
        last = self.standing
        if last is None or decoder.context.cut is not None:
            return None
        since = decoder.step - last.step
        if since > last.repeats or decoder.block_step - last.block_step != since or decoder.block != last.block:
            return None
        return last.plan.repeated(last.block, noisy)

    def plan(self, canvases: Sequence[CanvasState], decoder: Decoder) -> CanvasPlans:
        """The canvases that take part in the next pass, each with its plan; the first of `canvases` is conditional."""
        first = canvases[0]
        context = decoder.context
        if context.shift is not None:
            first.shift, first.adapter = context.shift, context.adapter or self.pending.request.adapter
        plan = self._ask(first, decoder, decoder.step - self.first_step, self.passes, alone=len(canvases) == 1)
        if self.readers and not plan.fills:
            for reader in self.readers:
                predict = reader.predicts(first.canvas.noisy)
                if predict is not None:
                    plan = replace(plan, predict=predict, transfer=None)
        if len(canvases) == 1 or not self.policy.guides(decoder.step - self.first_step):
            return ((first, plan),)
        second = canvases[1]
        other = self._ask(second, decoder, self.paired, self.passes - self.left_out, alone=False)
        if plan.fills and not other.fills:
            return ((first, plan),)  # a fill pass of one canvas: the other has nothing to do until both predict
        if other.fills and not plan.fills:
            raise PlanError("the unconditional canvas has a fill pass where the other one predicts")
        # Canvases with clocks of their own still predict, and transfer, the same positions.
        return (first, plan), (second, replace(other, predict=plan.predict, transfer=plan.transfer))

    def closing(self, first: CanvasState, decoder: Decoder, block: range) -> CanvasPlans:
        """The pass that completes a page for other requests after the response: over the last `block`."""
        view = replace(self._view(first, decoder, decoder.step - self.first_step, self.passes), block=block)
        plan = self.policy.closing(view)
        if plan is None:
            raise PlanError("a policy that shares pages has no plan for the last block's commit pass")
        return ((first, replace(plan, sees=view.sees)),)

    def _ask(self, state: CanvasState, decoder: Decoder, step: int, pass_index: int, *, alone: bool) -> Plan:
        """The policy's plan. It may stand for later steps if the canvas is the only one."""
        view = self._view(state, decoder, step, pass_index)
        plan = self.policy.plan(view)
        plan = plan if plan.sees is view.sees else replace(plan, sees=view.sees)
        self.standing = None
        if decoder.context.drafts:
            return replace(plan, transfer=view.rows(0, 0))
        if decoder.context.cut is not None:
            return plan.below(decoder.context.cut, state.memo)
        repeats = self.policy.repeats(view) if alone else 0
        if repeats:
            self.standing = Standing(plan, repeats, step, view.block_step, view.block)
        return plan

    def _view(self, state: CanvasState, decoder: Decoder, step: int, pass_index: int) -> View:
        canvas, decoding, context = state.canvas, self.pending.decoding, decoder.context
        return View(
            layers=state.ledger.layers,
            step=step,
            block_step=decoder.block_step,
            block=decoder.block,
            prompt=canvas.prompt,
            noisy=canvas.noisy,
            settled=canvas.settled,
            prefix=state.prefix,
            pass_index=pass_index,
            shift=state.shift,
            sees=context.sees,
            opens=context.opens,
            committed=context.committed,
            response=canvas.end,
            stop=self.end.stop,
            seed=decoding.seed,
            steps=decoding.scheduled_steps,
            decoding=context,
            last_pass=self.last_pass,
            memo=state.memo,
            hook_output=state.hook_output,
        )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step; None is no limit."""

    budget: int | None = None  # row-layers
    max_refreshes: int | None = None  # items that refresh
    canvases: int | None = None
    share: int | None = None  # row-layers of one client's items, while items of other clients are ready too
    rows: int | None = None  # rows in any layer, by the memory of the device

    @classmethod
    def of(cls, config: EngineConfig, share: int, rows: int | None) -> "StepLimits":
        """Those of `config`; `rows` are what memory allows."""
        return cls(config.max_row_layers, config.max_refreshes, config.max_num_seqs, share, rows)


class Scheduler:
    """Round-robin over running members, within limits.

    A member that does not fit waits, and comes first in the next round, so none starves. The first in line is always
    taken: one whose turn is larger than the budget would never run otherwise. If not all fit, clients take turns, and
    so do the bodies of a client: the first member of each client comes before the second of any. Waiting does not
    change results.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits  # those of a step
        self.line: deque[Member] = deque()  # the members, in the order in which they are taken
        self._owners: Counter[Owner] = Counter()
        self._clients: Counter[str] = Counter()
        self._canvases = 0
        self._round = 0  # number of rounds in which not all took part
        self._served: dict[Owner | str, int] = {}  # the last such round in which a body or client took part

    def add(self, member: Member) -> None:
        """Append a member to the line."""
        self.line.append(member)
        self._owners[member.owner] += 1
        self._clients[member.owner.client] += 1
        self._canvases += len(member.canvases)

    def remove(self, member: Member) -> None:
        """Remove a member from the line."""
        self.line.remove(member)
        owner = member.owner
        self._canvases -= len(member.canvases)
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
            self._served.pop(owner, None)
        self._clients[owner.client] -= 1
        if not self._clients[owner.client]:
            del self._clients[owner.client]
            self._served.pop(owner.client, None)

    def next(self, turns: Sequence[Turn]) -> list[Turn]:
        """Those of `turns` that are taken in the next step; their members go to the end of the line.

        `turns` are of members that can run, in the order of the line. The others keep their places.
        """
        chosen, refused = self._within(turns)
        if refused and len(self._owners) > 1:
            chosen, _ = self._within(self._fairly(turns))
            self._round += 1
            for turn in chosen:
                owner = turn.member.owner
                self._served[owner] = self._served[owner.client] = self._round
        if len(chosen) < len(self.line):
            going = {id(turn.member) for turn in chosen}
            staying = (member for member in self.line if id(member) not in going)
            self.line = deque([*staying, *(turn.member for turn in chosen)])
        return chosen

    def _within(self, turns: Iterable[Turn]) -> tuple[list[Turn], bool]:
        """Those of `turns` that fit, in their order, and whether one did not fit."""
        limits, chosen, refused = self.limits, list[Turn](), False
        most = None if limits.canvases is None or self._canvases <= limits.canvases else limits.canvases
        several = len(self._clients) > 1 and len({turn.member.owner.client for turn in turns}) > 1
        share = limits.share if several else None
        spent = refreshing = canvases = wide = 0
        by_client: Counter[str] = Counter()
        for turn in turns:
            member, tally = turn.member, turn.tally
            # A refresh is heavy if it costs more than the cheapest pass of its request so far, or is the first pass.
            # If every pass refreshes, as with one step a block, none is put off.
            heavy = limits.max_refreshes is not None and tally.refreshes and tally.cost > (member.cheapest or 0)
            full = most is not None and canvases + len(member.canvases) > most
            full = full or (limits.rows is not None and wide + tally.rows > limits.rows)
            if (heavy and refreshing == limits.max_refreshes) or (chosen and full):
                refused = True
                continue
            rows, client = tally.rows, member.owner.client
            left = None if limits.budget is None else limits.budget - spent
            if left is not None:
                member.fit(turn, left)
            price = turn.tally.cost
            beyond = left is not None and price > left
            if (chosen and beyond) or (share is not None and by_client[client] and by_client[client] + price > share):
                refused = True
                continue
            chosen.append(turn)
            spent += price
            wide += rows
            refreshing += heavy
            canvases += len(member.canvases)
            if share is not None:
                by_client[client] += price
        return chosen, refused

    def _fairly(self, turns: Iterable[Turn]) -> list[Turn]:
        """The first turn of each client before the second of any, and of its bodies; who waited longest is first."""
        of_body: Counter[Owner] = Counter()
        by_client: dict[str, list[tuple[int, int, int, Turn]]] = {}
        for place, turn in enumerate(turns):
            owner = turn.member.owner
            by_client.setdefault(owner.client, []).append((of_body[owner], self._served.get(owner, 0), place, turn))
            of_body[owner] += 1
        ranked = [
            (number, self._served.get(client, 0), place, turn)
            for client, waiting in by_client.items()
            for number, (*_, place, turn) in enumerate(sorted(waiting, key=lambda entry: entry[:3]))
        ]
        return [turn for *_, turn in sorted(ranked, key=lambda entry: entry[:3])]
