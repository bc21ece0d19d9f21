"""Endpoints that read the model's distribution: decisions, and vLLM's scores and rankings."""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from remask.request.questions import Decisions, Question
from remask.server.bodies import BodyRoute
from remask.server.deciding import Answered, respond
from remask.server.document import RUNS, answers
from remask.server.protocol.reads import DecisionsBody, RelevanceBody, RerankBody, ScoreBody
from remask.server.routes.common import service_of
from remask.server.schemas.reads import DecisionsAnswer, RerankAnswer, ScoreAnswer
from remask.server.shapes import Json


async def decisions(request: Request, body: DecisionsBody) -> Response:
    """Answer questions over one state by the model's distribution over labels."""
    service = service_of(request)
    made: list[Decisions] = []

    def ask() -> list[Decisions]:
        made.append(body.asked)
        return made

    def shape(answered: list[Answered]) -> Json:
        (each,), (asked,) = answered, made
        return {
            "id": f"decisions-{request.state.request_id}",
            "object": "decisions",
            "created": int(time.time()),
            "model": body.model or service.config.model_names[0],
            "answers": {name: decision.content for name, decision in each.decisions.items()},
            "together": asked.together,
            "calibrated": asked.calibrate,
            "usage": each.usage,
            "remask": each.work,
        }

    return await respond(service, request, body, ask, shape)


async def score(request: Request, body: ScoreBody) -> Response:
    """Score how well texts answer others."""
    service = service_of(request)

    def shape(answered: list[Answered]) -> Json:
        scores = [_relevance(each)[0] for each in answered] if len(answered) > 1 else _relevance(answered[0])
        return {
            "id": f"score-{request.state.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or service.config.model_names[0],
            "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)],
            "usage": _usage(answered),
        }

    return await respond(service, request, body, partial(_pairs, body), shape)


async def rerank(request: Request, body: RerankBody) -> Response:
    """Rank documents by how well they answer a query."""
    service = service_of(request)

    def shape(answered: list[Answered]) -> Json:
        scores = _relevance(answered[0])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        return {
            "id": f"rerank-{request.state.request_id}",
            "model": body.model or service.config.model_names[0],
            "usage": _usage(answered),
            "results": [
                {"index": i, "document": {"text": body.documents[i]}, "relevance_score": scores[i]} for i in order
            ],
        }

    return await respond(service, request, body, lambda: [_relevant(body, body.query, body.documents)], shape)


def router() -> APIRouter:
    """The routes of this module."""
    made = APIRouter(route_class=BodyRoute)
    made.add_api_route("/v1/decisions", decisions, methods=["POST"], responses=answers(DecisionsAnswer, *RUNS))
    made.add_api_route("/v1/score", score, methods=["POST"], responses=answers(ScoreAnswer, *RUNS))
    made.add_api_route("/v1/rerank", rerank, methods=["POST"], responses=answers(RerankAnswer, *RUNS))
    others: dict[str, Callable[..., Awaitable[Response]]] = {
        "/v1/systemone": decisions,
        "/score": score,
        "/rerank": rerank,
        "/v2/rerank": rerank,
    }
    for path, endpoint in others.items():
        made.add_api_route(path, endpoint, methods=["POST"], include_in_schema=False)
    return made


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


def _relevance(answered: Answered) -> list[float]:
    """The probability of yes for each document."""
    return [decision.probabilities["yes"] for decision in answered.decisions.values()]


def _usage(answered: Sequence[Answered]) -> Json:
    """vLLM's usage of scores."""
    tokens = sum(each.usage["prompt_tokens"] for each in answered)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
