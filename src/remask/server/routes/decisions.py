"""Endpoints that read the model's distribution: decisions, and vLLM's scores and rankings.

Canvases go to the engine in waves, so that one body holds few of its places at a time.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

from fastapi import Request, Response

from remask.answers.decided import Decision, told
from remask.answers.decisions import DecisionPlan
from remask.engine.async_engine import Ticket
from remask.engine.request import PendingRequest
from remask.errors import ConfigError, QueueFullError
from remask.readers.decision import Reading
from remask.request.questions import Decisions, Question
from remask.request.result import Result
from remask.server.answers.base import Answer, work
from remask.server.answers.decisions import SystemOneUsage
from remask.server.answers.generation import check_end
from remask.server.answers.responses import ResponseUsage, response_usage
from remask.server.errors import ApiError, json_response
from remask.server.protocol.reads import (
    DecisionsBody,
    ReadBody,
    RelevanceBody,
    RerankBody,
    ScoreBody,
    SystemOneBody,
)
from remask.server.service import Service, run_while_connected, service_of
from remask.server.texts import ITEM

RETRY_S = 0.05  # until a further wave asks again for places in a full queue


class ReadUsage(Answer):
    """Tokens of the prompts that were read."""

    prompt_tokens: int
    total_tokens: int


class Score(Answer):
    """How well a document answers a query: a probability."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Answer):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ReadUsage


class RankedText(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document and its score. `index` is its place in the request."""

    index: int
    document: RankedText
    relevance_score: float


class RerankAnswer(Answer):
    """Documents, the best first."""

    id: str
    model: str
    usage: ReadUsage
    results: list[Ranked]


Answered: TypeAlias = tuple[dict[str, Decision], list[Result]]
"""Decisions by the ids of their questions, and the results of the canvases that were read."""


async def decisions(request: Request, body: DecisionsBody) -> Response:
    """Answer questions over one input by the model's distribution over labels. With `state` as `/v1/systemone`."""
    return await _decided(request, body)


async def systemone(request: Request, body: SystemOneBody) -> Response:
    """Answer questions over one state by the model's distribution over labels."""
    return await _decided(request, body)


async def _decided(request: Request, body: DecisionsBody) -> Response:
    (asked,), ((found, results),) = await _answered(request, body, lambda: [body.asked])
    counted = response_usage(results)
    used: ResponseUsage | SystemOneUsage = counted
    if asked.input is None:
        used = {"input_tokens": counted["input_tokens"], "output_tokens": counted["output_tokens"]}
    return json_response(
        {
            "model": body.model or service_of(request).config.model_names[0],
            "answers": told(asked, found),
            "usage": used,
            "x_remask": {
                **work(results),
                "reads": len(results),
                "together": asked.together,
                "calibrated": asked.calibrate,
            },
        }
    )


async def score(request: Request, body: ScoreBody) -> Response:
    """Score how well texts answer others."""
    _, answered = await _answered(request, body, partial(_pairs, body))
    scores = [each for found, _ in answered for each in _relevance(found)]
    answer: ScoreAnswer = {
        "id": f"score-{request.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or service_of(request).config.model_names[0],
        "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)],
        "usage": _usage(answered),
    }
    return json_response(answer)


async def rerank(request: Request, body: RerankBody) -> Response:
    """Rank documents by how well they answer a query."""
    _, answered = await _answered(request, body, lambda: [_relevant(body, body.query, body.documents)])
    scores = _relevance(answered[0][0])
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    answer: RerankAnswer = {
        "id": f"rerank-{request.state.request_id}",
        "model": body.model or service_of(request).config.model_names[0],
        "usage": _usage(answered),
        "results": [{"index": i, "document": {"text": body.documents[i]}, "relevance_score": scores[i]} for i in order],
    }
    return json_response(answer)


def _pairs(body: ScoreBody) -> list[Decisions]:
    """The decisions of each query: one query asks about all documents, several about one each."""
    queries, documents = body.pairs
    if len(queries) == 1:
        return [_relevant(body, queries[0], documents)]
    return [_relevant(body, query, [document]) for query, document in zip(queries, documents, strict=True)]


def _relevant(body: RelevanceBody, query: str, documents: Sequence[str]) -> Decisions:
    """One question for each document, over the query as their shared state."""
    questions = {
        str(number): Question("yes_no", f"Document: {document}\n\n{body.instructions}", labels=body.labels or "auto")
        for number, document in enumerate(documents)
    }
    return Decisions(f"Query: {query}", questions)


def _relevance(found: Mapping[str, Decision]) -> list[float]:
    """The probability of yes for each document."""
    return [decision.probabilities["yes"] for decision in found.values()]


def _usage(answered: Sequence[Answered]) -> ReadUsage:
    """vLLM's usage of scores; every canvas counts its prompt."""
    tokens = sum(result.usage.prompt_tokens for _, results in answered for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def _answered(
    request: Request, body: ReadBody, ask: Callable[[], list[Decisions]]
) -> tuple[list[Decisions], list[Answered]]:
    """The decisions of a body, which `ask` makes on a text thread, and what came of each of them."""
    service = service_of(request)
    began = service.clock()
    service.note_user(request, body.user)
    service.intake.terms(body)
    service.intake.check_priority(body.priority or 0, leads=request.state.leads)
    with _named(body):
        asked = await service.off_loop(request, ITEM * body.questions_count, ask)
        size = service.intake.check_decisions(asked)
        plans = await service.off_loop(request, size, partial(_plans, service, asked))
    answered = await _Waves(service, request, body, plans, began).run()
    results = [result for _, own in answered for result in own]
    request.state.log_fields.update(
        {
            "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
            "cached_tokens": sum(result.usage.cached_tokens for result in results),
            "reads": len(results),
        }
    )
    return asked, answered


@contextmanager
def _named(body: ReadBody) -> Iterator[None]:
    """Give the fields of decisions, with which errors begin, the names that they have in `body`."""
    try:
        yield
    except ConfigError as error:
        for name, own in body.names.items():
            if (text := str(error)).startswith(name):
                raise ConfigError(own + text.removeprefix(name)) from error
        raise


def _plans(service: Service, asked: Sequence[Decisions]) -> list[DecisionPlan]:
    """The plans of `asked`, which take as many canvases as the server allows, all together."""
    most, reads, plans = service.config.max_reads, 0, []
    for each in asked:
        plans.append(service.llm.session.decisions(each, most))
        reads += len(plans[-1].asks)
        if reads > most:
            raise ConfigError(f"questions take more than {most} canvases; ask fewer at a time (max_reads)")
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
            answered.append((plan.answers([result.reads[Reading.name] for result in own]), own))
            at += len(plan.asks)
        return answered

    def _checked(self, parts: Sequence[tuple[int, int]], first: int) -> list[PendingRequest]:
        """The requests of a wave, ready to begin; its first canvas is number `first` of the body."""
        terms = self.service.intake.terms(self.body)
        policy = self.service.intake.policy(terms)
        given = {name: getattr(terms, name) for name in ("adapter", "cache_salt", "priority")}
        given["deadline_s"] = self._left()
        made = []
        for offset, (plan, number) in enumerate(parts):
            name = f"{self.request.state.request_id}-d{first + offset}-{next(self.service.intake.numbers)}"
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
