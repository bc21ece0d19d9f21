"""The endpoints, the FastAPI application that serves them, and its OpenAPI document."""

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
# Statuses of errors:
_ANY_PATH = (401, 403, 408, 413, 500)  # of the gate, and of defects
READS = (400, 404)  # of endpoints that read a body
RUNS = (400, 404, 429, 503, 504)  # of endpoints that run requests


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint, as it is served and as the OpenAPI document describes it.

    Attributes:
        methods: HTTP methods, separated by spaces.
        call: the function that answers a request.
        answer: the class of the answer, or the media type of an answer that is a text.
        statuses: statuses of its errors, beside those of the gate and of defects.
        stream: the union of the events of a streamed answer. Each is the JSON text behind `data:`.
        error: the form of its errors.
        aliases: further paths, which the document leaves out.
    """

    methods: str
    path: str
    call: Callable[..., Awaitable[Response]]
    answer: Any
    statuses: Sequence[int] = ()
    stream: Any = None
    error: type[Any] = Error
    aliases: Sequence[str] = ()

    def add(self, router: APIRouter) -> None:
        """Add its routes to `router`."""
        options: dict[str, Any] = {"response_class": Response} if isinstance(self.answer, str) else {}
        for method in self.methods.split():
            router.add_api_route(self.path, self.call, methods=[method], responses=self.responses, **options)
        for path in self.aliases:
            router.add_api_route(path, self.call, methods=[self.methods], include_in_schema=False)

    @property
    def responses(self) -> dict[int | str, Any]:
        """What FastAPI documents of its answer and its errors, by status."""
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
        aliases=["/v1/fim/completions"],  # Inception's and Mistral's path for a prompt and its suffix
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
    Endpoint("POST", "/v1/score", decisions.score, ScoreAnswer, RUNS, aliases=["/score"]),
    Endpoint("POST", "/v1/rerank", decisions.rerank, RerankAnswer, RUNS, aliases=["/rerank", "/v2/rerank"]),
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
    """An application whose OpenAPI document describes the events of streams too."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made once."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        schemas = document["components"]["schemas"]
        stream_events = (event for endpoint in ENDPOINTS for event in get_args(endpoint.stream))
        inputs: list[Any] = [(event, "serialization", TypeAdapter(event)) for event in stream_events]
        schemas |= TypeAdapter.json_schemas(inputs, ref_template=_REF)[1]["$defs"]
        # Invalid bodies get a 400 here, not FastAPI's 422.
        for operations in document["paths"].values():
            for operation in operations.values():
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        return document


def router() -> APIRouter:
    """A router with all endpoints and pages."""
    routes = APIRouter(route_class=BodyRoute)
    for endpoint in (*ENDPOINTS, *_PLAYGROUND):
        endpoint.add(routes)
    add_pages(routes)
    return routes


def create_app(
    llm: LLM, config: ServerConfig, observer: StepObserver | None = None, clock: Callable[[], float] = time.monotonic
) -> FastAPI:
    """Return an application that serves `llm`, whose engine only the application may use from then on.

    The engine's thread runs during the application's lifespan. When the lifespan ends, accepted requests have
    `config.drain_timeout` seconds to finish. `app.state.service` is its `Service`, with this `clock` in seconds. Raises
    `ConfigError` if the model does not allow the settings.
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
    # Not `include_router`: FastAPI would build the routes during the first request.
    app.router.routes.extend(router().routes)
    # Paths that the error for an unknown one may suggest: without the playground's, and without parameters.
    paths = {path for endpoint in ENDPOINTS for path in (endpoint.path, *endpoint.aliases)}
    app.state.paths = sorted(path for path in paths if "{" not in path)
    app.add_middleware(Gate, config=config)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # official clients send headers of their own; no cookie lets anybody in
            expose_headers=["X-Request-Id", LEFT_OUT],
        )
    return app
