"""Runs decisions: their canvases go to the engine in waves, so that one body holds few of its places at a time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request, Response

from remask.answers.decisions import DecisionPlan
from remask.engine.async_engine import Ticket
from remask.engine.pending import PendingRequest
from remask.errors import ConfigError, QueueFullError
from remask.readers.decision import Reading
from remask.request.questions import Decision, Decisions
from remask.request.result import Result
from remask.server.errors import ApiError, json_response
from remask.server.generation import check_end
from remask.server.protocol.reads import ReadBody
from remask.server.responses import CLOSED_BY_CLIENT, ClientGoneError, run_while_connected
from remask.server.service import Service
from remask.server.shapes import Json, usage, work
from remask.server.texts import ITEM

RETRY_S = 0.05  # until a further wave asks again for places in a full queue


@dataclass(frozen=True, slots=True)
class Answered:
    """Decisions by the ids of their questions, and the results of the canvases that were read."""

    decisions: dict[str, Decision]
    results: list[Result]

    @property
    def usage(self) -> Json:
        """OpenAI's usage; every canvas counts its prompt."""
        return usage(self.results, 1)

    @property
    def work(self) -> Json:
        """The work of the passes."""
        return {**work(self.results), "reads": len(self.results)}


async def respond(
    service: Service,
    request: Request,
    body: ReadBody,
    ask: Callable[[], list[Decisions]],
    shape: Callable[[list[Answered]], Json],
) -> Response:
    """Answer a body: `ask` makes its decisions on a text thread, and `shape` makes an answer of what came of them."""
    began = service.clock()
    service.note_user(request, body.user)
    service.intake.check_model(body.model)
    service.intake.check_priority(body.priority or 0, leads=request.state.leads)
    try:
        asked = await service.off_loop(request, ITEM * body.questions_count, ask)
        size = service.intake.check_decisions(asked)
        plans = await service.off_loop(request, size, partial(_plans, service, asked))
        answered = await _Waves(service, request, body, plans, began).run()
    except ClientGoneError:
        return Response(status_code=CLOSED_BY_CLIENT)
    results = [result for each in answered for result in each.results]
    request.state.log_fields.update(
        {
            "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
            "cached_tokens": sum(result.usage.cached_tokens for result in results),
            "reads": len(results),
        }
    )
    return json_response(shape(answered))


def _plans(service: Service, asked: Sequence[Decisions]) -> list[DecisionPlan]:
    """The plans of `asked`, which take as many canvases as the server allows, all together."""
    left, most = service.config.max_reads, service.config.max_reads
    plans = []
    for each in asked:
        if left < 1:
            raise ConfigError(f"questions take more than {most} canvases; ask fewer at a time (max_reads)")
        plans.append(service.llm.decisions(each, left))
        left -= len(plans[-1].asks)
    return plans


class _Waves:
    """The canvases of some plans, as many at a time as choices of one request may run."""

    def __init__(
        self, service: Service, request: Request, body: ReadBody, plans: Sequence[DecisionPlan], began: float
    ) -> None:
        self.service, self.request, self.body, self.plans = service, request, body, plans
        self._ends = None if body.deadline_s is None else began + body.deadline_s
        self._parts = [(plan, number) for plan in range(len(plans)) for number in range(len(plans[plan].asks))]
        engine = service.engine
        self._wave = min(service.config.max_choices, engine.engine.config.max_num_seqs + engine.max_queue)

    async def run(self) -> list[Answered]:
        """What came of each plan. Raises what the engine raises, and `ClientGoneError`."""
        results: list[Result] = []
        for first in range(0, len(self._parts), self._wave):
            parts = self._parts[first : first + self._wave]
            size = sum(ITEM + len(self.plans[plan].asks[number].before) for plan, number in parts)
            pending = await self.service.off_loop(self.request, size, self._checked, parts, first)
            results += await run_while_connected(self.request.receive, self._read(pending, first > 0))
        answered, at = [], 0
        for plan in self.plans:
            own = results[at : at + len(plan.asks)]
            answered.append(Answered(plan.answers([result.reads[Reading.name] for result in own]), own))
            at += len(plan.asks)
        return answered

    def _checked(self, parts: Sequence[tuple[int, int]], first: int) -> list[PendingRequest]:
        """The requests of a wave, ready to begin; its first canvas is number `first` of the body."""
        terms = self.body.terms
        policy = self.service.intake.policy(terms)
        given = {"cache_salt": terms.cache_salt, "priority": terms.priority, "deadline_s": self._left()}
        made = []
        for offset, (plan, number) in enumerate(parts):
            name = f"{self.request.state.request_id}-d{first + offset}-{self.service.intake.number()}"
            asked = self.plans[plan].request(number, name, policy=policy, **given)
            made.append(self.service.llm.engine.check(replace(asked, owner=self.service.owner(self.request))))
        return made

    async def _read(self, pending: Sequence[PendingRequest], later: bool) -> list[Result]:
        """The results of a wave. A `later` one waits for room in the queue, where the first is refused."""
        ticket = await self._submitted(pending, later)
        found: dict[str, Result] = {}
        try:
            async for events in ticket:
                for event in events:
                    if event.result is not None:
                        check_end(event.result)
                        found[event.id] = event.result
        finally:
            ticket.cancel()
        return [found[each.request.id] for each in pending]

    async def _submitted(self, pending: Sequence[PendingRequest], later: bool) -> Ticket:
        while True:
            try:
                return self.service.engine.submit(pending)
            except QueueFullError:
                if not later:
                    raise
                self._left()
                await asyncio.sleep(RETRY_S)

    def _left(self) -> float | None:
        """Seconds until the deadline of the body. Raises a 504 where it has passed."""
        if self._ends is None:
            return None
        left = self._ends - self.service.clock()
        if left <= 0:
            raise ApiError(504, "the decisions did not end within deadline_s; give them more time, or ask fewer")
        return left
