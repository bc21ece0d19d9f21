"""The endpoints that only the page at `/` uses."""

from collections.abc import Callable
from typing import Annotated

from fastapi import Query, Request, Response

from remask.server.answers.base import Answer
from remask.server.errors import ApiError, json_response
from remask.server.playground.example import example
from remask.server.playground.sandbox import Sandbox, Sessions
from remask.server.protocol.base import Body
from remask.server.service import service_of

Number = Annotated[int, Query(ge=0, le=999)]


class Closed(Answer):
    """The session that was ended."""

    closed: str


class NewRequest(Body):
    """A request of a sandbox, with the shared prefix or with a prompt of its own."""

    shared_prefix: bool


class Caching(Body):
    """Whether a sandbox caches prefixes."""

    enabled: bool


async def begin(request: Request, number: Number = 0) -> Response:
    """Return the messages, sampling parameters and cache policies that the page starts with."""
    service = service_of(request)
    made = await service.off_loop(request, 0, example, service.llm, service.config.sampling, number)
    return json_response(made)


async def open_pages(request: Request) -> Response:
    """Begin a session. Its allocator is separate from the pool that serves requests."""
    name, sandbox = _sessions(request).open()
    return _state(name, sandbox)


async def get_pages(request: Request, session: str) -> Response:
    """Return the pages, page tables and totals of a session."""
    return _state(session, _sessions(request).find(session))


async def close_pages(request: Request, session: str) -> Response:
    """End the session."""
    _sessions(request).close(session)
    return json_response({"closed": session})


async def add_request(request: Request, session: str, body: NewRequest) -> Response:
    """Add a request to a session."""
    return _changed(request, session, lambda sandbox: sandbox.add(body.shared_prefix))


async def finish_request(request: Request, session: str, number: int) -> Response:
    """Finish a request and release its pages."""

    def finish(sandbox: Sandbox) -> None:
        if not sandbox.finish(number):
            raise ApiError(404, f"no request {number} runs in this session")

    return _changed(request, session, finish)


async def step_pages(request: Request, session: str) -> Response:
    """Settle one block of every request."""
    return _changed(request, session, Sandbox.step)


async def switch_caching(request: Request, session: str, body: Caching) -> Response:
    """Switch prefix caching on or off."""
    return _changed(request, session, lambda sandbox: sandbox.set_caching(body.enabled))


def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sandboxes
    return sessions


def _changed(request: Request, session: str, change: Callable[[Sandbox], None]) -> Response:
    sandbox = _sessions(request).find(session)
    change(sandbox)
    return _state(session, sandbox)


def _state(name: str, sandbox: Sandbox) -> Response:
    return json_response(sandbox.state(name), headers={"Cache-Control": "no-store"})
