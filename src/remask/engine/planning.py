"""Planning a step: the plan of each request by its policy, where its response ends, and which members take part."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from remask.engine.canvas_state import CanvasState
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
from remask.text.incremental import StopRule, StopScan


class ResponseEnd:
    """Looks for the end of one response while its tokens settle. It reads the canvas and never writes to it.

    Settled tokens never change, so a settled stop can end a response.

    Attributes:
        stop: canvas position of the first stop token that has settled, also if noise precedes it; None without one.
        reason: why the response is complete; None while it is not.
        lead: number of leading response tokens that `settle` has returned.
    """

    def __init__(self, canvas: Canvas, template: Template, rule: StopRule, *, has_form: bool) -> None:
        """If `has_form`, the response has a prescribed form, so it is complete wherever it ends."""
        self.stop: int | None = None
        self.reason: FinishReason | None = None
        self.lead = 0
        self._canvas = canvas
        self._template = template
        self._rule = rule
        self._has_form = has_form
        self._stops = rule.stop_ids
        self._scan = StopScan(rule)
        self._scan_length = template.tail  # leading response tokens that the scan has passed
        # Whether the canvas may hold a stop: a stop text, or a stop token that was given or written.
        tokens = canvas.tokens[canvas.prompt :].tolist()
        self._may_stop = rule.decode is not None or not self._stops.isdisjoint(tokens)

    def settle(self, transfer: Transfer | None, decoding: Decoding, decoder: Decoder) -> tuple[int, ...]:
        """Advance `lead` over the tokens that have become final, up to the first gap, and return these.

        Sets `stop`, and `reason` if the response is complete. `transfer` is that of the pass: its tokens must be on the
        canvas, and `decoder` must have advanced to the next step.
        """
        stops, canvas = self._stops, self._canvas
        stop_written = bool(stops) and transfer is not None and not stops.isdisjoint(transfer.token_ids)
        if stop_written:
            self._may_stop = True
            self.stop = self._find_settled_stop()
        start = self.lead
        self.lead = canvas.settled_lead
        settled = tuple(canvas.response[start : self.lead].tolist()) if self.lead > start else ()
        finished = decoder.finished
        is_complete = finished and not decoding.can_grow
        if self._may_stop:
            in_block = decoder.block_step > 0 and not finished
            may_end = not in_block or decoding.may_stop_within_block(stop_written=stop_written)
            if may_end and self.find_stop_length(self.lead) is not None:
                self.reason = "stop"
                return settled
            is_complete = is_complete or (in_block and may_end and self._has_stop_after_response())
        if is_complete:
            self.reason = "stop" if self._ended_before_length() else "length"
        return settled

    def find_stop_length(self, lead: int) -> int | None:
        """Scan the first `lead` response tokens. Returns the number up to a stop in the last hole; None without one."""
        start = self._scan_length
        if lead > start and self._may_stop:
            self._scan_length = lead
            self._scan.push(self._canvas.response[start:lead].tolist())
        return None if self._scan.end is None else self._template.tail + self._scan.end

    def _find_settled_stop(self) -> int | None:
        canvas, tail = self._canvas, self._canvas.prompt + self._template.tail
        stops = np.fromiter(self._stops, dtype=np.int64)
        is_settled_stop = np.isin(canvas.tokens[tail : canvas.end], stops) & ~canvas.noisy[tail : canvas.end]
        return tail + int(is_settled_stop.argmax()) if is_settled_stop.any() else None

    def _has_stop_after_response(self) -> bool:
        """Whether a stop token follows the complete response in the rest of its block, with no noise before it."""
        canvas = self._canvas
        if self.lead < canvas.end - canvas.prompt:
            return False
        noisy = canvas.noisy[canvas.end :]
        lead = int(noisy.argmax()) if noisy.any() else len(noisy)
        return not self._stops.isdisjoint(canvas.tokens[canvas.end : canvas.end + lead].tolist())

    def _ended_before_length(self) -> bool:
        """Whether the response ended by itself, and not because it filled a hole."""
        return self._has_form or not any(hole.variable and self._is_full(hole) for hole in self._template.holes)

    def _is_full(self, hole: Hole) -> bool:
        """Whether a hole holds neither padding nor a stop."""
        tokens = self._canvas.response[hole.start : hole.stop].tolist()
        scan = StopScan(self._rule)
        scan.push(tokens)
        return scan.end is None and not any(token in self._template.padding for token in tokens)


@dataclass(slots=True)
class RepeatingPlan:
    """A plan of `step` that repeats in the next `repeats` steps of its block."""

    plan: Plan
    repeats: int
    step: int
    block_step: int  # number of `step` within its block
    block: range
    tally: Tally | None = None  # the cost of each of these passes


@dataclass(slots=True)
class PassPlanner:
    """Plans the passes of one request."""

    pending: PendingRequest
    policy: CachePolicy
    end: ResponseEnd
    readers: Sequence[Reader]  # may restrict the predicted positions
    first_step: int = 0  # the step at which the canvas got its present length, from which the policy counts
    repeating: RepeatingPlan | None = None  # the last plan, if it repeats
    last_pass: LastPass = field(default_factory=LastPass)  # results of the last pass
    passes: int = 0  # passes since the step began
    guided_steps: int = 0  # steps in which the unconditional canvas of guidance took part
    skipped_fills: int = 0  # fill passes of the step in which the unconditional canvas took no part

    def repeat_plan(self, decoder: Decoder, noisy: Mask) -> Plan | None:
        """The last plan, for the step of `decoder`, at which the positions `noisy` [T] are not final.

        Returns None if it does not repeat there.
        """
        last = self.repeating
        if last is None or decoder.context.cut is not None:
            return None
        steps = decoder.step - self.first_step - last.step
        if steps > last.repeats or decoder.block_step - last.block_step != steps or decoder.block != last.block:
            return None
        return last.plan.repeated(last.block, noisy)

    def plan(self, canvases: Sequence[CanvasState], decoder: Decoder) -> CanvasPlans:
        """Plan the next pass. Returns the canvases that take part, with their plans. The first canvas is conditional.

        Sets `repeating`, and the shift and adapter of the first canvas if the decoder has any for this step. Raises
        `PlanError` if the unconditional canvas has a fill pass where the other one predicts.
        """
        first = canvases[0]
        context = decoder.context
        if context.shift is not None:
            first.shift = context.shift
            first.adapter = context.adapter or self.pending.request.adapter
        plan = self._plan_canvas(first, decoder, decoder.step - self.first_step, self.passes, alone=len(canvases) == 1)
        if not plan.fills:
            for reader in self.readers:
                predict = reader.predicts(first.canvas.noisy)
                if predict is not None:
                    plan = replace(plan, predict=predict, transfer=None)
        if len(canvases) == 1 or not self.policy.guides(decoder.step - self.first_step):
            return ((first, plan),)
        second = canvases[1]
        other = self._plan_canvas(second, decoder, self.guided_steps, self.passes - self.skipped_fills, alone=False)
        if plan.fills and not other.fills:
            return ((first, plan),)  # the unconditional canvas waits until both predict
        if other.fills and not plan.fills:
            raise PlanError("the unconditional canvas has a fill pass where the other one predicts")
        # Both canvases predict and transfer the same positions, also if the policy counts their steps separately.
        return (first, plan), (second, replace(other, predict=plan.predict, transfer=plan.transfer))

    def plan_closing(self, first: CanvasState, decoder: Decoder, block: range) -> CanvasPlans:
        """The pass after the response, over its last `block`, which completes a page for other requests.

        Clears `repeating`. Raises `PlanError` if the policy has no plan for it.
        """
        self.repeating = None
        view = replace(self._view(first, decoder, decoder.step - self.first_step, self.passes), block=block)
        plan = self.policy.closing(view)
        if plan is None:
            raise PlanError("a policy that shares pages has no plan for the last block's commit pass")
        return ((first, replace(plan, sees=view.sees)),)

    def _plan_canvas(self, state: CanvasState, decoder: Decoder, step: int, pass_index: int, *, alone: bool) -> Plan:
        """Ask the policy for the plan of one canvas. Sets `repeating` to it if it repeats and the canvas is `alone`.

        The steps of an unconditional canvas are counted separately, so `step` and `pass_index` are parameters.
        """
        view = self._view(state, decoder, step, pass_index)
        plan = self.policy.plan(view)
        plan = plan if plan.sees is view.sees else replace(plan, sees=view.sees)
        self.repeating = None
        if decoder.context.drafts:
            return replace(plan, transfer=view.rows(0, 0))
        if decoder.context.cut is not None:
            return plan.below(decoder.context.cut, state.memo)
        repeats = self.policy.repeats(view) if alone else 0
        if repeats:
            self.repeating = RepeatingPlan(plan, repeats, step=step, block_step=view.block_step, block=view.block)
        return plan

    def _view(self, state: CanvasState, decoder: Decoder, step: int, pass_index: int) -> View:
        """What the policy sees of one canvas: `step` on the policy's count, and `pass_index` passes after it began."""
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
    max_refreshes: int | None = None  # members that refresh
    max_canvases: int | None = None
    client_budget: int | None = None  # row-layers of one client, while members of other clients are ready too
    max_rows: int | None = None  # rows in any layer, by the memory of the device


class Scheduler:
    """Round-robin over running members, within limits.

    A member that does not fit waits, and comes first in the next round, so none starves. The first in line is always
    taken: one whose turn is larger than the budget would never run otherwise. If not all fit, clients take turns, and
    so do the bodies of a client: the first member of each client comes before the second of any. Waiting does not
    change results.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.line: deque[Member] = deque()  # the members, in the order in which they are taken
        self._owners: Counter[Owner] = Counter()  # members of each body
        self._clients: Counter[str] = Counter()  # members of each client
        self._canvases = 0  # of all members
        self._round = 0  # number of rounds in which not all took part
        self._last_round: dict[Owner | str, int] = {}  # the last such round in which a body or client took part

    def add(self, member: Member) -> None:
        """Append a member to the line."""
        self.line.append(member)
        self._owners[member.owner] += 1
        self._clients[member.owner.client] += 1
        self._canvases += len(member.canvases)

    def remove(self, member: Member) -> None:
        """Remove a member from the line. Raises `ValueError` if it is not in it."""
        self.line.remove(member)
        owner = member.owner
        self._canvases -= len(member.canvases)
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
            self._last_round.pop(owner, None)
        self._clients[owner.client] -= 1
        if not self._clients[owner.client]:
            del self._clients[owner.client]
            self._last_round.pop(owner.client, None)

    def choose_turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """Choose the turns of the next step, and move their members to the end of the line.

        `turns` are of members that can run, in the order of the line.
        """
        selected, is_complete = self._select(turns)
        if not is_complete and len(self._owners) > 1:
            selected, _ = self._select(self._order_fairly(turns))
            self._round += 1
            for turn in selected:
                owner = turn.member.owner
                self._last_round[owner] = self._round
                self._last_round[owner.client] = self._round
        if len(selected) < len(self.line):
            served = {id(turn.member) for turn in selected}
            others = (member for member in self.line if id(member) not in served)
            self.line = deque([*others, *(turn.member for turn in selected)])
        return selected

    def _select(self, turns: Sequence[Turn]) -> tuple[list[Turn], bool]:
        """The turns that fit into a step, in their order, and whether these are all of them.

        Members that can cut their turns (`Member.fit`) cut them to the budget that is left.
        """
        limits = self.limits
        selected = list[Turn]()
        max_canvases = limits.max_canvases
        has_several_clients = len(self._clients) > 1 and len({turn.member.owner.client for turn in turns}) > 1
        client_budget = limits.client_budget if has_several_clients else None
        total_cost = refreshes = canvases = rows = 0
        client_costs: Counter[str] = Counter()
        for turn in turns:
            member, tally = turn.member, turn.tally
            client, turn_rows = member.owner.client, tally.max_rows
            # A refresh is heavy if it costs more than the cheapest pass of its request so far, or is the first pass.
            # If every pass refreshes, as with one step a block, none is postponed.
            is_heavy = limits.max_refreshes is not None and tally.refreshes and tally.cost > (member.min_cost or 0)
            if is_heavy and refreshes == limits.max_refreshes:
                continue
            exceeds_canvases = max_canvases is not None and canvases + len(member.canvases) > max_canvases
            exceeds_rows = limits.max_rows is not None and rows + turn_rows > limits.max_rows
            if selected and (exceeds_canvases or exceeds_rows):
                continue
            exceeds_budget = False
            if limits.budget is not None:
                member.fit(turn, limits.budget - total_cost)
                exceeds_budget = total_cost + turn.tally.cost > limits.budget
            cost = turn.tally.cost
            client_cost = client_costs[client]
            exceeds_client_budget = client_budget is not None and client_cost > 0 and client_cost + cost > client_budget
            if (selected and exceeds_budget) or exceeds_client_budget:
                continue
            selected.append(turn)
            total_cost += cost
            rows += turn_rows
            refreshes += is_heavy
            canvases += len(member.canvases)
            client_costs[client] += cost
        return selected, len(selected) == len(turns)

    def _order_fairly(self, turns: Sequence[Turn]) -> list[Turn]:
        """The first turn of each client, then the second of each, and so on; and likewise for the bodies of a client.

        Among equal ones, the client or body that took part least recently comes first.
        """
        turns_of_body: Counter[Owner] = Counter()
        by_client: dict[str, list[tuple[int, int, int]]] = {}
        for index, turn in enumerate(turns):
            owner = turn.member.owner
            key = turns_of_body[owner], self._last_round.get(owner, 0), index
            by_client.setdefault(owner.client, []).append(key)
            turns_of_body[owner] += 1
        order = []
        for client, keys in by_client.items():
            for number, (*_, index) in enumerate(sorted(keys)):
                order.append((number, self._last_round.get(client, 0), index))
        return [turns[index] for *_, index in sorted(order)]
