"""The FastAPI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from remask import __version__
from remask.engine.async_engine import StepObserver
from remask.llm import LLM
from remask.server.config import ServerConfig
from remask.server.errors import add_handlers
from remask.server.gate import Gate
from remask.server.routes import cache, inference, info
from remask.server.service import Service


def create_app(llm: LLM, config: ServerConfig, observer: StepObserver | None = None) -> FastAPI:
    """An application that serves `llm`, whose engine it alone may use from now on.

    The engine's thread lives as long as the application's lifespan; at its end accepted requests get
    `config.drain_timeout` seconds. `app.state.service` is what the endpoints share. Raises `ConfigError` on settings
    that the model does not allow.
    """
    service = Service(llm, config, observer)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
            await service.engine.drain(config.drain_timeout)
        finally:
            await service.engine.stop()
            service.close()

    # The interactive pages of FastAPI load scripts of other hosts.
    app = FastAPI(title="remask", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    add_handlers(app)
    for part in (inference, info, cache):
        app.include_router(part.router())
    app.add_middleware(Gate, api_keys=config.api_keys, max_body_bytes=config.max_body_bytes)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id"],
        )
    return app
