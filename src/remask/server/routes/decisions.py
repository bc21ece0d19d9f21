"""Endpoints that read the model's distribution: decisions, and vLLM's scores and rankings.

Canvases go to the engine in waves, so that one body holds few of its places at a time.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from fastapi import Request, Response

from remask.answers.decided import Decision, api_answers
from remask.answers.decisions import DecisionPlan
from remask.engine.async_engine import Ticket
from remask.engine.request import PendingRequest
from remask.engine.request import Request as EngineRequest
from remask.errors import CanvasLengthError, ConfigError, QueueFullError
from remask.readers.decision import Reading
from remask.request.questions import Decisions, Question
from remask.request.result import Result
from remask.server.answers.base import Answer, Work, doc
from remask.server.answers.generation import check_end, work
from remask.server.answers.responses import ResponseUsage, response_usage
from remask.server.bodies import CHARS_PER_TEXT
from remask.server.errors import ApiError, json_response
from remask.server.protocol.reads import DecisionsBody, ReadBody, RelevanceBody, RerankBody, ScoreBody, SystemOneBody
from remask.server.service import Service, run_while_connected, service_of

RETRY_S = 0.05  # until a further wave asks again for places in a full queue


class ReadWork(Work):
    """The work of decisions."""

    reads: Annotated[int, doc("Canvases that were read.")]
    together: Annotated[bool, doc("Whether all questions stood on one canvas.")]
    calibrated: bool


class _DecisionBase(Answer):
    x_label_mass: NotRequired[Annotated[float, doc("The probability that the model gives to the labels at all.")]]
    x_entropy: NotRequired[Annotated[float, doc("Of the probabilities, in nats.")]]
    x_labels: NotRequired[Annotated[list[str], doc("What the model would have written for each alternative.")]]

    confidence: NotRequired[Annotated[float, doc("From 0 to 1, as the page on decisions defines it.")]]
    score: NotRequired[Annotated[float, doc("The expected level, counted from 0.")]]
    number: NotRequired[Annotated[int, doc("The most probable one.")]]
    mean: NotRequired[Annotated[float, doc("The expected number.")]]


class SystemOneDecision(_DecisionBase):
    """The answer to one question of `/v1/systemone`, with the fields of its type."""

    type: Literal["choice", "score", "noul", "yes_no", "predicate", "number"]
    noul: NotRequired[Annotated[float, doc("The probability of yes.")]]
    choice: NotRequired[Annotated[str, doc("The most probable name.")]]
    legend: NotRequired[Annotated[dict[str, Any], doc("The levels of a score, by their numbers.")]]
    probabilities: NotRequired[Annotated[dict[str, float], doc("By name, level or number.")]]


class SystemOneUsage(Answer):
    """Tokens of the prompts that were read; none are written."""

    input_tokens: int
    output_tokens: int


class SystemOneAnswer(Answer):
    """Answers by the ids of their questions."""

    model: str
    answers: dict[str, SystemOneDecision]
    usage: SystemOneUsage
    x_remask: ReadWork


class OptionShare(Answer):
    """The probability of a choice, a level or a number."""

    value: str | bool | int
    label: NotRequired[Annotated[str, doc("Of a level.")]]
    probability: float


class OpenAIDecision(_DecisionBase):
    """The answer to one question of `/v1/decisions`, with the fields of its type; of a refusal only its name."""

    type: Literal["choice", "score", "predicate", "refusal", "noul", "yes_no", "number"]
    name: str | None
    probability: NotRequired[Annotated[float, doc("That the predicate is true.")]]
    choice: NotRequired[Annotated[str | bool, doc("The most probable value.")]]
    probabilities: NotRequired[list[OptionShare]]


class DecisionsAnswer(Answer):
    """Answers in the order of their questions."""

    model: str
    answers: list[OpenAIDecision]
    usage: ResponseUsage
    x_remask: ReadWork


DecisionsOrSystemOne: TypeAlias = DecisionsAnswer | SystemOneAnswer
"""An answer of `/v1/decisions`: to a body with `input` the former, to one with `state` the latter."""


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


Outcome: TypeAlias = tuple[dict[str, Decision], list[Result]]
"""Decisions by the ids of their questions, and the results of the canvases that were read."""


async def decisions(request: Request, body: DecisionsBody) -> Response:
    """Answer questions over one input by the model's distribution over labels. With `state` as `/v1/systemone`."""
    return await _decide(request, body)


async def systemone(request: Request, body: SystemOneBody) -> Response:
    """Answer questions over one state by the model's distribution over labels."""
    return await _decide(request, body)


async def _decide(request: Request, body: DecisionsBody) -> Response:
    """Answer the questions of a body in the form of the API that it came by."""
    (questions,), ((answers, results),) = await _outcomes(request, body, lambda: [body.decisions])
    usage: ResponseUsage | SystemOneUsage = response_usage(results)
    if questions.input is None:
        usage = {"input_tokens": usage["input_tokens"], "output_tokens": usage["output_tokens"]}
    reads = {"reads": len(results), "together": questions.together, "calibrated": questions.calibrate}
    return json_response(
        {
            "model": _model(request, body),
            "answers": api_answers(questions, answers),
            "usage": usage,
            "x_remask": {**work(results), **reads},
        }
    )


async def score(request: Request, body: ScoreBody) -> Response:
    """Score how well texts answer others."""
    _, outcomes = await _outcomes(request, body, partial(_pairs, body))
    scores = [score for answers, _ in outcomes for score in _relevance(answers)]
    answer: ScoreAnswer = {
        "id": f"score-{request.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": _model(request, body),
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
        "usage": _usage(outcomes),
    }
    return json_response(answer)


async def rerank(request: Request, body: RerankBody) -> Response:
    """Rank documents by how well they answer a query."""
    _, outcomes = await _outcomes(request, body, lambda: [_relevant(body, body.query, body.documents)])
    scores = _relevance(outcomes[0][0])
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    answer: RerankAnswer = {
        "id": f"rerank-{request.state.request_id}",
        "model": _model(request, body),
        "usage": _usage(outcomes),
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


def _relevance(answers: Mapping[str, Decision]) -> list[float]:
    """The probability of yes for each document."""
    return [decision.probabilities["yes"] for decision in answers.values()]


def _usage(outcomes: Sequence[Outcome]) -> ReadUsage:
    """The usage in the form of vLLM's scores. The prompt of every canvas counts."""
    tokens = sum(result.usage.prompt_tokens for _, results in outcomes for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _model(request: Request, body: ReadBody) -> str:
    """The name of the model in answers."""
    return body.model or service_of(request).config.model_names[0]


async def _outcomes(
    request: Request, body: ReadBody, make: Callable[[], list[Decisions]]
) -> tuple[list[Decisions], list[Outcome]]:
    """Make decisions on a text thread and run them. Returns them and their outcomes. Adds fields to the access log.

    Raises `ConfigError` with the field names of `body`, `QueueFullError`, `ApiError` and `ClientGoneError`.
    """
    service = service_of(request)
    start = service.clock()
    service.note_user(request, body.user)
    service.intake.terms(body)
    service.intake.check_priority(body.priority or 0, leads=request.state.leads)
    with _field_names(body):
        decisions = await service.off_loop(request, CHARS_PER_TEXT * body.questions_count, make)
        size = service.intake.check_decisions(decisions)
        plans = await service.off_loop(request, size, partial(_plans, service, decisions))
    outcomes = await _Waves(service, request, body, plans, start).run()
    results = [result for _, reads in outcomes for result in reads]
    request.state.log_fields.update(
        {
            "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
            "cached_tokens": sum(result.usage.cached_tokens for result in results),
            "reads": len(results),
        }
    )
    return decisions, outcomes


@contextmanager
def _field_names(body: ReadBody) -> Iterator[None]:
    """Rename the field with which a `ConfigError` begins to its name in `body`."""
    try:
        yield
    except ConfigError as error:
        for name, field in body.names.items():
            if (text := str(error)).startswith(name):
                raise ConfigError(field + text.removeprefix(name)) from error
        raise


def _plans(service: Service, decisions: Sequence[Decisions]) -> list[DecisionPlan]:
    """Return the plan of each of `decisions`. Raises `ConfigError` if they take more canvases than `max_reads`."""
    max_reads = service.config.max_reads
    plans: list[DecisionPlan] = []
    reads = 0
    for questions in decisions:
        plans.append(service.llm.session.plan_decisions(questions, max_reads))
        reads += len(plans[-1].asks)
        if reads > max_reads:
            raise ConfigError(f"questions take more than {max_reads} canvases; ask fewer at a time (max_reads)")
    return plans


class _Waves:
    """Runs the canvases of some plans in waves, each of as many as one request may have choices."""

    def __init__(
        self, service: Service, request: Request, body: ReadBody, plans: Sequence[DecisionPlan], start: float
    ) -> None:
        self.service = service
        self.request = request
        self.body = body
        self.plans = plans
        self._deadline = None if body.deadline_s is None else start + body.deadline_s
        # The canvases of all plans, each by the indices of its plan and of its ask.
        self._canvases = [(index, number) for index, plan in enumerate(plans) for number in range(len(plan.asks))]
        engine = service.engine
        self._wave_size = min(service.config.max_choices, engine.engine.config.max_num_seqs + engine.max_queue)

    async def run(self) -> list[Outcome]:
        """Return the outcome of each plan. Raises what the engine raises, and `ClientGoneError`."""
        results: list[Result] = []
        for start in range(0, len(self._canvases), self._wave_size):
            wave = self._canvases[start : start + self._wave_size]
            size = sum(CHARS_PER_TEXT + len(self.plans[index].asks[number].prompt_end) for index, number in wave)
            pending = await self.service.off_loop(self.request, size, self._pending, wave, start)
            results += await run_while_connected(self.request.receive, self._read(pending, may_wait=start > 0))
        outcomes: list[Outcome] = []
        offset = 0
        for plan in self.plans:
            plan_results = results[offset : offset + len(plan.asks)]
            outcomes.append((plan.answers([result.reads[Reading.name] for result in plan_results]), plan_results))
            offset += len(plan.asks)
        return outcomes

    def _pending(self, wave: Sequence[tuple[int, int]], start: int) -> list[PendingRequest]:
        """Return the checked requests of a wave, whose first canvas is number `start` of the body."""
        terms = self.service.intake.terms(self.body)
        policy = self.service.session.policy_of(terms)
        fields = {name: getattr(terms, name) for name in ("adapter", "cache_salt", "priority")}
        fields |= {"deadline_s": self._remaining_s(), "owner": self.service.owner(self.request)}
        pending = []
        for position, (index, number) in enumerate(wave, start):
            name = f"{self.request.state.request_id}-d{position}-{next(self.service.intake.numbers)}"
            request = self.plans[index].request(number, name, policy=policy, **fields)
            pending.append(self._check(request))
        return pending

    def _check(self, request: EngineRequest) -> PendingRequest:
        """Check a request of a canvas. Raises `ConfigError`; that of a canvas that is too long names a field."""
        try:
            return self.service.llm.engine.check(request)
        except CanvasLengthError as error:
            lengths = f"{error.prompt_length} tokens, and {error.response_length} to read"
            raise ConfigError(f"{self.body.state_name} and the questions on it, {lengths}{error.problem}") from error

    async def _read(self, pending: Sequence[PendingRequest], *, may_wait: bool) -> list[Result]:
        """Run a wave, and return its results. Raises `QueueFullError` if it can never run.

        Raises it on a full queue too, unless the wave `may_wait`.
        """
        ticket = await self._submit(pending, may_wait)
        results: dict[str, Result] = {}
        try:
            async for events in ticket:
                for event in events:
                    if event.result is not None:
                        check_end(event.result)
                        results[event.id] = event.result
        finally:
            ticket.cancel()
        return [results[request.request.id] for request in pending]

    async def _submit(self, pending: Sequence[PendingRequest], may_wait: bool) -> Ticket:
        while True:
            try:
                return self.service.engine.submit(pending)
            except QueueFullError:
                work = sum(request.row_layers for request in pending)
                if not may_wait or work > self.service.engine.max_client_work:  # then waiting would not help
                    raise
                self._remaining_s()  # raises once the deadline has passed
                await asyncio.sleep(RETRY_S)

    def _remaining_s(self) -> float | None:
        """Seconds until the deadline of the body, or None if it has none. Raises a 504 if it has passed."""
        if self._deadline is None:
            return None
        remaining = self._deadline - self.service.clock()
        if remaining <= 0:
            raise ApiError(504, "the decisions did not end within deadline_s; give them more time, or ask fewer")
        return remaining
