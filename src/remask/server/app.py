"""The endpoints, the FastAPI application that serves them, and the OpenAPI document that tells of them."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_args

from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from pydantic import TypeAdapter

from remask import __version__
from remask.engine.async_engine import StepObserver
from remask.llm import LLM
from remask.server.answers.choices import ChatAnswer, ChatEvent, CompletionAnswer, CompletionEvent
from remask.server.answers.messages import MessageAnswer, MessageEvent
from remask.server.answers.responses import ResponseAnswer, ResponseEvent
from remask.server.bodies import BodyRoute
from remask.server.config import ServerConfig
from remask.server.errors import Error, MessagesError, SystemOneError, add_handlers
from remask.server.gate import LEFT_OUT, Gate
from remask.server.metrics import CONTENT_TYPE
from remask.server.pages import add_pages
from remask.server.playground.sandbox import SandboxState, Sessions
from remask.server.routes import cache, decisions, inference, info, playground
from remask.server.routes.cache import CacheContents, Dropped
from remask.server.routes.decisions import DecisionsOrSystemOne, RerankAnswer, ScoreAnswer, SystemOneAnswer
from remask.server.routes.inference import DetokenizedText, Rendered, TokenCount, Tokens
from remask.server.routes.info import Health, Model, ModelInfo, Models, Version
from remask.server.routes.playground import Closed, Example
from remask.server.service import Service

_REF = "#/components/schemas/{model}"
_OR_EVENTS = "The answer; with `stream` server-sent events, the `data` of each of which is described."
_ANY_PATH = (401, 403, 408, 413, 500)  # what the gate refuses, and defects
READS = (400, 404)  # of what reads a body
RUNS = (400, 404, 429, 503, 504)  # of what gives work to the engine


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint, as it is served and as the document tells of it.

    Attributes:
        methods: such as `GET`.
        answer: the class of the answer, or the media type of one that is a text.
        statuses: those of its errors, beside what the gate and defects answer on any path.
        stream: the union of the events that the answer is made of where a body asks for a stream, each of which is the
            JSON text behind `data:`.
        error: the form of its errors.
        others: further paths that the document does not tell of.
    """

    methods: str
    path: str
    call: Callable[..., Awaitable[Response]]
    answer: Any
    statuses: Sequence[int] = ()
    stream: Any = None
    error: type[Any] = Error
    others: Sequence[str] = ()

    def add(self, router: APIRouter) -> None:
        """Serve it."""
        options: dict[str, Any] = {"response_class": Response} if isinstance(self.answer, str) else {}
        for method in self.methods.split():
            router.add_api_route(self.path, self.call, methods=[method], responses=self.responses, **options)
        for path in self.others:
            router.add_api_route(path, self.call, methods=[self.methods], include_in_schema=False)

    @property
    def responses(self) -> dict[int | str, Any]:
        """The answer and the errors, by status."""
        answer: dict[str, Any] = {"description": "The answer."}
        if isinstance(self.answer, str):
            answer["content"] = {self.answer: {"schema": {"type": "string"}}}
        else:
            answer["model"] = self.answer
        if self.stream is not None:
            events = {"anyOf": [{"$ref": _REF.format(model=event.__name__)} for event in get_args(self.stream)]}
            answer["description"] = _OR_EVENTS
            answer["content"] = {"text/event-stream": {"schema": events}}
        statuses = sorted({*_ANY_PATH, *self.statuses})
        errors: dict[int | str, Any] = {status: {"model": self.error} for status in statuses}
        return {200: answer, **errors}


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", inference.chat_completions, ChatAnswer, RUNS, stream=ChatEvent),
    Endpoint(
        "POST",
        "/v1/completions",
        inference.completions,
        CompletionAnswer,
        RUNS,
        stream=CompletionEvent,
        others=["/v1/fim/completions"],  # the name that Inception's and Mistral's APIs have for a prompt and its suffix
    ),
    Endpoint("POST", "/v1/chat/completions/render", inference.render_chat, Rendered, [*READS, 429]),
    Endpoint("POST", "/v1/completions/render", inference.render_completion, list[Rendered], [*READS, 429]),
    Endpoint("POST", "/v1/responses", inference.responses, ResponseAnswer, RUNS, stream=ResponseEvent),
    Endpoint("POST", "/v1/messages", inference.messages, MessageAnswer, RUNS, stream=MessageEvent, error=MessagesError),
    Endpoint(
        "POST", "/v1/messages/count_tokens", inference.count_tokens, TokenCount, [*READS, 429], error=MessagesError
    ),
    Endpoint("POST", "/tokenize", inference.tokenize, Tokens, [*READS, 429]),
    Endpoint("POST", "/detokenize", inference.detokenize, DetokenizedText, [*READS, 429]),
    Endpoint("POST", "/v1/decisions", decisions.decisions, DecisionsOrSystemOne, RUNS),
    Endpoint(
        "POST",
        "/v1/systemone",
        decisions.systemone,
        SystemOneAnswer,
        [422, *(status for status in RUNS if status != 400)],
        error=SystemOneError,
    ),
    Endpoint("POST", "/v1/score", decisions.score, ScoreAnswer, RUNS, others=["/score"]),
    Endpoint("POST", "/v1/rerank", decisions.rerank, RerankAnswer, RUNS, others=["/rerank", "/v2/rerank"]),
    Endpoint("GET", "/v1/models", info.models, Models),
    Endpoint("GET", "/v1/models/{name:path}", info.model, Model, [404]),
    Endpoint("GET", "/health", info.health, Health, [503]),
    Endpoint("GET POST", "/ping", info.health, Health, [503]),
    Endpoint("GET", "/ready", info.health, Health, [503]),
    Endpoint("GET", "/live", info.live, Health, [503]),
    Endpoint("GET", "/version", info.version, Version),
    Endpoint("GET", "/get_model_info", info.get_model_info, ModelInfo),
    Endpoint("GET", "/metrics", info.metrics, CONTENT_TYPE.partition(";")[0]),
    Endpoint("GET", "/v1/cache", cache.list_entries, CacheContents),
    Endpoint("DELETE", "/v1/cache", cache.drop_all, Dropped),
    Endpoint("DELETE", "/v1/cache/{prefix_id}", cache.drop, Dropped, [404, 409]),
)
_SESSION = "/playground/pages/{session}"
_PLAYGROUND = (
    Endpoint("GET", "/playground/example", playground.begin, Example, [400, 429]),
    Endpoint("POST", "/playground/pages", playground.open_pages, SandboxState),
    Endpoint("GET", _SESSION, playground.get_pages, SandboxState, [404]),
    Endpoint("DELETE", _SESSION, playground.close_pages, Closed, [404]),
    Endpoint("POST", f"{_SESSION}/step", playground.step_pages, SandboxState, [404]),
    Endpoint("POST", f"{_SESSION}/caching", playground.switch_caching, SandboxState, [400, 404]),
    Endpoint("POST", f"{_SESSION}/requests", playground.add_request, SandboxState, [400, 404, 409]),
    Endpoint("DELETE", f"{_SESSION}/requests/{{number}}", playground.finish_request, SandboxState, [400, 404]),
)


class DescribedApp(FastAPI):
    """An application whose OpenAPI document tells of the events of streams too."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        schemas = document["components"]["schemas"]
        streamed = (event for endpoint in ENDPOINTS for event in get_args(endpoint.stream))
        events: list[Any] = [(event, "serialization", TypeAdapter(event)) for event in streamed]
        schemas |= TypeAdapter.json_schemas(events, ref_template=_REF)[1]["$defs"]
        # FastAPI's own answer to a body that does not fit, which is a 400 here.
        for operations in document["paths"].values():
            for operation in operations.values():
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        return document


def router() -> APIRouter:
    """The routes of all endpoints and pages."""
    routes = APIRouter(route_class=BodyRoute)
    for endpoint in (*ENDPOINTS, *_PLAYGROUND):
        endpoint.add(routes)
    add_pages(routes)
    return routes


def create_app(
    llm: LLM,
    config: ServerConfig,
    observer: StepObserver | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Return an application that serves `llm`. From then on only the application may use its engine.

    The engine's thread runs during the application's lifespan. When the lifespan ends, accepted requests have
    `config.drain_timeout` seconds to finish. The endpoints find the `Service` in `app.state.service`, which
    gets `clock`. Raises `ConfigError` if the model does not allow the settings.
    """
    service = Service(llm, config, observer, clock)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
            await service.engine.drain(config.drain_timeout)
        finally:
            await service.engine.stop()
            service.close()

    # FastAPI's interactive pages load scripts from other hosts.
    app = DescribedApp(
        title="remask",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        servers=[{"url": config.root_path}] if config.root_path else None,
        redirect_slashes=False,  # the gate takes both spellings, and a proxy's name is not known here
    )
    app.state.service = service
    app.state.sandboxes = Sessions(clock=clock)
    add_handlers(app)
    # FastAPI builds the routes of an included router at the first request, which would wait for it.
    app.router.routes.extend(router().routes)
    # What the error of an unknown path may suggest: neither the pages of the playground nor what has parameters.
    paths = {path for endpoint in ENDPOINTS for path in (endpoint.path, *endpoint.others)}
    app.state.paths = sorted(path for path in paths if "{" not in path)
    app.add_middleware(Gate, config=config)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # official clients send names of their own; no cookie lets anybody in
            expose_headers=["X-Request-Id", LEFT_OUT],
        )
    return app
