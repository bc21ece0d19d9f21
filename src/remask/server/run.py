"""Runs the application under uvicorn. It drains before it stops."""

import asyncio
import logging
import math
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from remask.server.config import url_of
from remask.server.connection import Exchanges, connection_class
from remask.server.service import Service

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5  # time at shutdown for finished answers to reach their clients


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first SIGTERM or SIGINT: accepted requests finish, new ones get a 503.

    A second signal ends the process at once.
    """

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        service: Service = app.state.service
        config = service.config
        super().__init__(
            uvicorn.Config(
                Exchanges(app),
                log_config=None,
                access_log=False,
                http=connection_class(config),
                ws="none",  # an upgraded connection would be under none of the limits
                timeout_keep_alive=math.ceil(config.keep_alive_timeout),
                timeout_graceful_shutdown=SEND_TIMEOUT_S,
                server_header=False,
            )
        )
        self._service = service
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the listener until a signal arrives."""
        super().run(sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, and remember the event loop."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            log.info("running on %s", url_of(self._listener))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signal handlers' signature
        """Drain on the first signal, and restore the default handlers: the next one ends even a process that hangs."""
        for exit_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(exit_signal, signal.SIG_DFL)
        if self._loop is None:
            self.should_exit = True
            self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        """Wait until the open requests have ended, for `drain_timeout` seconds at most, and stop the server."""
        timeout = self._service.config.drain_timeout
        engine = self._service.engine
        open_requests = engine.running + engine.waiting
        log.info("draining: %d requests have %g s to finish; a second signal ends them", open_requests, timeout)
        try:
            await engine.drain(timeout)
        finally:
            self.should_exit = True
