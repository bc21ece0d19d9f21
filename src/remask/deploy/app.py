"""The Ray Serve application: replicas of the application of `remask serve`, and a front that routes requests to them.

Start it with `serve run remask.deploy.app:build model=bundled max_replicas=4`, or with the same names in a config file
of Ray Serve.
"""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from remask.deploy.asgi import REPLICA_HEADER, Call, Head, respond
from remask.deploy.routing import prefix_identity
from remask.deploy.settings import FleetSettings
from remask.errors import EngineDeadError
from remask.llm import LLM
from remask.server.answers.generation import failed_stream
from remask.server.app import create_app
from remask.server.errors import ApiError, error_response

log = logging.getLogger(__name__)

ROUTERS = {"prefix": "remask.deploy.router.PrefixRouter", "round-robin": "remask.deploy.router.RoundRobinRouter"}

TRIES = 2
"""Replicas that a request may begin on. One that brings its replica down brings no more than these down."""

LOST = (RayActorError, ReplicaUnavailableError, EngineDeadError)
"""What is raised where the replica of a request has died or cannot be reached, or its engine has died."""


class Replica:
    """One engine behind the application of `remask serve`. The front calls it directly, without HTTP."""

    async def __init__(self, settings: FleetSettings) -> None:  # type: ignore[misc]
        options: dict[str, Any] = {"engine": settings.engine_config, "skip_bad_adapters": True, "reads": "text"}
        options |= {"cache": settings.cache, "chat_template": settings.chat_template, **settings.llm}
        self._llm = llm = LLM(settings.model, **options)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._app = create_app(llm, settings.server_config)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def answer(self, identity: bytes | None, call: Call) -> AsyncGenerator[Head | bytes, None]:  # noqa: ARG002
        """Yield the response to `call` in parts. Only the router reads `identity`."""
        replica = call.header(REPLICA_HEADER)
        app: ASGIApp = self._app
        if replica not in (None, self._name.decode()):
            message = f"there is no replica {replica!r}; leave the header out to reach any replica"
            app = error_response(ApiError(404, message))
        async for part in respond(app, call):
            if isinstance(part, Head):
                if call.method == "POST":
                    self.check_health()  # an answer of a dead engine is an error, and another replica may do better
                yield Head(part.status, (*part.headers, (REPLICA_HEADER, self._name)))
            else:
                yield part

    def check_health(self) -> None:
        """Ray calls this regularly, and replaces a replica that raises."""
        engine = self._app.state.service.engine
        if not engine.alive:
            raise EngineDeadError(f"the engine is dead: {engine.error}")

    async def __del__(self) -> None:
        """Ray calls this at the end. Accepted requests have the drain timeout to finish."""
        await self._lifespan.__aexit__(None, None, None)
        self._llm.close()


class Front:
    """Accepts HTTP requests, computes their prefix identities, and streams the replicas' responses to the clients.

    A request whose replica is lost before it has answered anything runs again on another one. A stream that has begun
    ends with an error event.
    """

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        body = await self._body(request)
        client = None if request.client is None else (request.client.host, request.client.port)
        call = Call(
            request.method, request.url.path, request.url.query.encode(), tuple(request.headers.raw), body, client
        )
        try:
            head, parts = await self._begin(call)
        except BackPressureError:
            return error_response(ApiError(429, "all replicas are full; try again later"))
        except (*LOST, DeploymentUnavailableError):
            return error_response(_lost())
        streams = any(b"text/event-stream" in value for name, value in head.headers if name == b"content-type")
        response = StreamingResponse(_rest(parts, streams), head.status)
        response.raw_headers = list(head.headers)
        return response

    async def _begin(self, call: Call) -> tuple[Head, Any]:
        """The first part of the response to `call`, and the parts that follow."""
        identity = _identity(call)
        for left in reversed(range(TRIES)):
            parts = self._replicas.remote(identity, call)
            try:
                return await anext(aiter(parts)), parts
            except LOST as error:
                log.warning("%s %s: the replica was lost, %d tries are left: %s", call.method, call.path, left, error)
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _body(self, request: Request) -> bytes:
        """Read the body, at most one byte more than replicas accept. They then refuse it with their own message."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body_bytes:
                return body[: self._max_body_bytes + 1]
        return body


def _lost() -> ApiError:
    return ApiError(503, "the replica of this request was lost; try again later", code="replica_lost")


async def _rest(parts: Any, streams: bool) -> AsyncIterator[bytes]:
    """Yield the rest of the response. If the client disconnects, cancel the request on its replica.

    Where the replica is lost, events end with an error. Any other body is cut off, so that its length tells.
    """
    try:
        async for part in parts:
            yield part
    except LOST as error:
        log.warning("the replica of a response that has begun was lost: %s", error)
        if not streams:
            raise
        yield failed_stream(_lost())
    finally:
        parts.cancel()


def _identity(call: Call) -> bytes | None:
    if call.method != "POST":
        return None
    try:
        return prefix_identity(json.loads(call.body))
    except (ValueError, RecursionError):
        return None


def build(settings: FleetSettings | Mapping[str, Any]) -> Any:
    """Return the application for `serve.run`. Raises `ConfigError` on invalid settings."""
    fleet = settings if isinstance(settings, FleetSettings) else FleetSettings.from_mapping(settings)
    kwargs = {"slots": fleet.spill.slots, "balance": fleet.balance} if fleet.routing == "prefix" else {}
    replicas = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=fleet.max_open_requests,
        max_queued_requests=fleet.max_open_requests,
        ray_actor_options={"num_cpus": fleet.num_cpus, "num_gpus": fleet.num_gpus},
        graceful_shutdown_timeout_s=fleet.shutdown_s,
        request_router_config={"request_router_class": ROUTERS[fleet.routing], "request_router_kwargs": kwargs},
        **fleet.scaling,
    )
    front = serve.deployment(
        Front,
        name="Front",
        max_ongoing_requests=fleet.max_open_requests * fleet.max_replicas,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas.bind(fleet), fleet.server_config.max_body_bytes)
