"""The FastAPI application."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

from remask import __version__
from remask.engine.async_engine import StepObserver
from remask.llm import LLM
from remask.server.config import ServerConfig
from remask.server.document import DescribedApp
from remask.server.errors import add_handlers
from remask.server.gate import Gate
from remask.server.playground.sessions import Sessions
from remask.server.routes import cache, decisions, inference, info, playground
from remask.server.service import Service


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
    app = DescribedApp(title="remask", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.state.sandboxes = Sessions(clock=clock)
    add_handlers(app)
    routers = [part.router() for part in (inference, decisions, info, cache, playground)]
    for router in routers:
        # FastAPI builds the routes of an included router at the first request, which would wait for it.
        app.router.routes.extend(router.routes)
    # What the error of an unknown path may suggest: neither the pages of the playground nor what has parameters.
    paths = {route.path for router in routers[:-1] for route in router.routes if isinstance(route, APIRoute)}
    app.state.paths = sorted(path for path in paths if "{" not in path)
    app.add_middleware(
        Gate,
        api_keys=config.api_keys,
        max_body_bytes=config.max_body_bytes,
        priority_keys=config.priority_keys,
        allowed_hosts=config.allowed_hosts,
        body_timeout=config.body_timeout,
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # official clients send names of their own; no cookie lets anybody in
            expose_headers=["X-Request-Id"],
        )
    return app
