"""The page at `/`, and the endpoints that only this page uses."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from remask.server.bodies import BodyRoute
from remask.server.document import answers
from remask.server.errors import ApiError, json_response
from remask.server.playground.example import example
from remask.server.playground.files import FILES, HEADERS, KINDS
from remask.server.playground.sandbox import PoolFullError, Sandbox
from remask.server.playground.sessions import Sessions
from remask.server.protocol.base import Body
from remask.server.reference.files import FILES as REFERENCE
from remask.server.routes.common import service_of
from remask.server.schemas.playground import Closed, Example, SandboxState

Number = Annotated[int, Query(ge=0, le=999)]
PAGES = "/playground/pages"


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
    sandbox = _sessions(request).find(session)
    try:
        sandbox.add(body.shared_prefix)
    except PoolFullError as error:
        raise ApiError(409, str(error)) from error
    return _state(session, sandbox)


async def finish_request(request: Request, session: str, number: int) -> Response:
    """Finish a request and release its pages."""
    sandbox = _sessions(request).find(session)
    if not sandbox.finish(number):
        raise ApiError(404, f"no request {number} runs in this session")
    return _state(session, sandbox)


async def step_pages(request: Request, session: str) -> Response:
    """Settle one block of every request."""
    sandbox = _sessions(request).find(session)
    sandbox.step()
    return _state(session, sandbox)


async def switch_caching(request: Request, session: str, body: Caching) -> Response:
    """Switch prefix caching on or off."""
    sandbox = _sessions(request).find(session)
    sandbox.set_caching(body.enabled)
    return _state(session, sandbox)


def router() -> APIRouter:
    """The routes of this module."""
    made = APIRouter(route_class=BodyRoute)
    for url, path in {**FILES, **REFERENCE}.items():
        made.add_api_route(url, _sender(path), methods=["GET"], include_in_schema=False)
    made.add_api_route("/playground/example", begin, methods=["GET"], responses=answers(Example, 400, 429))
    made.add_api_route(PAGES, open_pages, methods=["POST"], responses=answers(SandboxState))
    one, found = f"{PAGES}/{{session}}", answers(SandboxState, 404)
    bodied = answers(SandboxState, 400, 404)
    made.add_api_route(one, get_pages, methods=["GET"], responses=found)
    made.add_api_route(one, close_pages, methods=["DELETE"], responses=answers(Closed, 404))
    made.add_api_route(f"{one}/step", step_pages, methods=["POST"], responses=found)
    made.add_api_route(f"{one}/caching", switch_caching, methods=["POST"], responses=bodied)
    made.add_api_route(f"{one}/requests", add_request, methods=["POST"], responses=answers(SandboxState, 400, 404, 409))
    made.add_api_route(f"{one}/requests/{{number}}", finish_request, methods=["DELETE"], responses=bodied)
    return made


def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sandboxes
    return sessions


def _state(name: str, sandbox: Sandbox) -> Response:
    state: dict[str, Any] = {"session": name, **sandbox.state()}
    return json_response(state, headers={"Cache-Control": "no-store"})


def _sender(path: Path) -> Callable[[], Awaitable[Response]]:
    content, kind = path.read_bytes(), KINDS[path.suffix]

    async def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send
