"""The endpoints that only the page at `/` uses: the example that it starts with, and page pools to try out."""

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, cast

from fastapi import Query, Request, Response

from remask.engine import request as engine_request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import names_for
from remask.policies.bicache import DepthLookup
from remask.request.sampling_params import SamplingParams
from remask.server.answers.base import Answer, doc
from remask.server.errors import ApiError, json_response
from remask.server.playground.sandbox import Sandbox, Sessions
from remask.server.protocol.base import Body
from remask.server.service import service_of
from remask.tasks.cards import Card, Exercise, card

log = logging.getLogger(__name__)

_REFRESHES = {"refresh_interval": 4}  # often enough for a response of 8 tokens to show some
_OUTER = "bicache"
_NOT_INNER = ("none", "reuse", "exact", _OUTER)  # cannot be the inner policy of a composition
# Of any other model than a bundled one.
_PLAIN = Exercise(
    question="Why is the sky blue?", answer="", canvas="The sky is [[4]] because [[2-12]].", decision=None
)
_ANY = Card(
    answers="", system="You are a helpful assistant. Answer in one or two short sentences.", draw=lambda _: _PLAIN
)

Number = Annotated[int, Query(ge=0, le=999)]


class ExampleTurn(Answer):
    """A turn of the example."""

    role: Literal["system", "user"]
    content: str


class Example(Answer):
    """What the page starts with."""

    messages: list[ExampleTurn]
    answer: Annotated[str | None, doc("The right answer, where one is known.")]
    canvas: str
    decision: Mapping[str, Any] | None
    sampling: dict[str, Any]
    policies: list[str]
    pair: Annotated[tuple[str, str], doc("Two policies to compare.")]
    cache: str
    cache_config: dict[str, Any] | None


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
    return json_response(await service.off_loop(request, 0, example, service.llm, service.config.sampling, number))


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
    return _change(request, session, lambda sandbox: sandbox.add(body.shared_prefix))


async def finish_request(request: Request, session: str, number: int) -> Response:
    """Finish a request and release its pages."""

    def finish(sandbox: Sandbox) -> None:
        if not sandbox.finish(number):
            raise ApiError(404, f"no request {number} runs in this session")

    return _change(request, session, finish)


async def step_pages(request: Request, session: str) -> Response:
    """Settle one block of every request."""
    return _change(request, session, Sandbox.step)


async def switch_caching(request: Request, session: str, body: Caching) -> Response:
    """Switch prefix caching on or off."""
    return _change(request, session, lambda sandbox: sandbox.set_caching(body.enabled))


def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sandboxes
    return sessions


def _change(request: Request, session: str, change: Callable[[Sandbox], None]) -> Response:
    """Apply `change` to the sandbox of a session. Returns its new state; raises a 404 without such a session."""
    sandbox = _sessions(request).find(session)
    change(sandbox)
    return _state(session, sandbox)


def _state(name: str, sandbox: Sandbox) -> Response:
    return json_response(sandbox.state(name), headers={"Cache-Control": "no-store"})


def example(llm: LLM, defaults: Mapping[str, Any], number: int) -> Example:
    """Return an example for the page: a question, sampling parameters and cache policies.

    With a bundled model, `number` selects one of its questions, all of them about one system prompt. `defaults` are
    the server's sampling parameters.
    """
    bundled = card(llm.loaded.name)
    settings = llm.session.cache_config or None
    if bundled is not None and llm.session.cache == _OUTER:
        settings = settings or _REFRESHES
    model_card = bundled or _ANY
    question = model_card.draw(number)
    specs = _runnable_policies(llm, llm.session.params({}, defaults, prompt_tokens=1))
    return {
        "messages": cast("list[ExampleTurn]", model_card.messages(question)),
        "answer": question.answer or None,
        "canvas": question.canvas,
        "decision": question.decision,
        "sampling": llm.session.merged_defaults(defaults),
        "policies": specs,
        "pair": _policies_to_compare(llm, specs),
        "cache": llm.session.cache_name,
        "cache_config": settings,
    }


def _runnable_policies(llm: LLM, sampling: SamplingParams) -> list[str]:
    """Return the policies that can run with this sampling, alone and inside `bicache`."""
    names = names_for(llm.loaded.config.kind)
    inner = [f"{_OUTER}+{name}" for name in names if name not in _NOT_INNER] if _OUTER in names else []
    request = engine_request.Request("example", [0], sampling)
    default = [llm.session.cache] if isinstance(llm.session.cache, str) else []  # a request can name no object
    return [spec for spec in dict.fromkeys([*names, *inner, *default]) if _can_run(llm, spec, request)]


def _policies_to_compare(llm: LLM, specs: list[str]) -> tuple[str, str]:
    """Return the first of `specs`, and the server's default policy or else another one that can read a prefix here."""
    other_specs = [spec for spec in specs if spec != specs[0] and (_OUTER not in spec or llm.depth_table is not None)]
    preferred = [spec for spec in (llm.session.cache_name, _OUTER) if spec in other_specs]
    return specs[0], [*preferred, *other_specs, specs[0]][0]


def _can_run(llm: LLM, spec: str, request: engine_request.Request) -> bool:
    """Whether the engine accepts `request` under a policy. Logs unexpected errors of policies."""
    try:
        llm.engine.check(request.with_policy(llm.session.policy(spec, None, lambda: DepthLookup({}))))
    except ConfigError:
        return False
    except Exception:  # of another package's policy: the page lists the others
        log.exception("cache policy %r cannot be checked, and the playground leaves it out", spec)
        return False
    return True
