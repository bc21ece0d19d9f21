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
from remask.deploy.settings import FleetSettings, from_words
from remask.errors import EngineDeadError
from remask.llm import LLM
from remask.server.answers.generation import failed_stream
from remask.server.app import create_app
from remask.server.errors import ApiError, error_response

log = logging.getLogger(__name__)

ROUTERS = {"prefix": "remask.deploy.router.PrefixRouter", "round-robin": "remask.deploy.router.RoundRobinRouter"}

MAX_ATTEMPTS = 2
"""Replicas that a request may begin on, so that a request that crashes its replica crashes no more than these."""

LOST = (RayActorError, ReplicaUnavailableError, EngineDeadError)
"""Errors that mean that the replica of a request has died or cannot be reached, or that its engine has died."""


class Replica:
    """One engine behind the application of `remask serve`. The front calls it directly, without HTTP."""

    async def __init__(self, settings: FleetSettings) -> None:  # type: ignore[misc]
        options: dict[str, Any] = {"engine": settings.engine_config, "skip_bad_adapters": True, "reads": "text"}
        options |= {"cache": settings.cache, "chat_template": settings.chat_template, **settings.llm}
        self._llm = LLM(settings.model, **options)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._app = create_app(self._llm, settings.server_config)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def answer(self, identity: bytes | None, call: Call) -> AsyncGenerator[Head | bytes, None]:  # noqa: ARG002
        """Yield the response to `call`: its `Head`, then chunks of its body. Only the router reads `identity`.

        Raises `EngineDeadError` if the engine is dead once a POST is answered, so that the front tries another replica.
        """
        replica = call.header(REPLICA_HEADER)
        app: ASGIApp = self._app
        if replica not in (None, self._name.decode()):
            message = f"there is no replica {replica!r}; leave the header out to reach any replica"
            app = error_response(ApiError(404, message))
        async for part in respond(app, call):
            if isinstance(part, Head):
                if call.method == "POST":
                    self.check_health()
                yield Head(part.status, (*part.headers, (REPLICA_HEADER, self._name)))
            else:
                yield part

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead. Ray calls this often, and replaces a replica that raises."""
        engine = self._app.state.service.engine
        if not engine.alive:
            raise EngineDeadError(f"the engine is dead: {engine.error}")

    async def __del__(self) -> None:
        """Stop the server. Ray calls this at the end; accepted requests have the drain timeout to finish."""
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
        """Answer one request: with a 429 if all replicas are full, with a 503 if its replica was lost."""
        body = await self._read_body(request)
        client = None if request.client is None else (request.client.host, request.client.port)
        call = Call(
            # Not of `request.url`, which quotes a part of the path and reads the query as UTF-8.
            request.method,
            request.scope["path"],
            request.scope["query_string"],
            tuple(request.headers.raw),
            body,
            client,
        )
        try:
            head, parts = await self._dispatch(call)
        except BackPressureError:
            return error_response(ApiError(429, "all replicas are full; try again later"), request.scope)
        except (*LOST, DeploymentUnavailableError):
            return error_response(_replica_lost_error(), request.scope)
        is_stream = any(b"text/event-stream" in value for name, value in head.headers if name == b"content-type")
        response = StreamingResponse(_response_body(parts, is_stream), head.status)
        response.raw_headers = list(head.headers)
        return response

    async def _dispatch(self, call: Call) -> tuple[Head, Any]:
        """Run `call` on a replica. Returns the head of the response and an iterator of its further parts.

        If the replica is lost before it answers, tries another one. Raises one of `LOST` once all attempts have failed.
        """
        identity = _prefix_identity(call)
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            parts = self._replicas.remote(identity, call)
            try:
                return await anext(aiter(parts)), parts
            except LOST as error:
                message = "%s %s: the replica was lost, %d tries are left: %s"
                log.warning(message, call.method, call.path, attempts_left, error)
                if not attempts_left:
                    raise
        raise AssertionError("unreachable")

    async def _read_body(self, request: Request) -> bytes:
        """Read the body, up to one byte more than replicas accept: they refuse a larger one with their own message."""
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > self._max_body_bytes:
                break
        return b"".join(chunks)[: self._max_body_bytes + 1]


def _replica_lost_error() -> ApiError:
    return ApiError(503, "the replica of this request was lost; try again later", code="replica_lost")


async def _response_body(parts: Any, is_stream: bool) -> AsyncIterator[bytes]:
    """Yield the body of a response. Cancels the request on its replica if the client disconnects.

    If the replica is lost, a stream of events ends with an error event. For any other body its error, one of `LOST`, is
    raised: the client then gets fewer bytes than the Content-Length.
    """
    try:
        async for part in parts:
            yield part
    except LOST as error:
        log.warning("the replica of a response that has begun was lost: %s", error)
        if not is_stream:
            raise
        yield failed_stream(_replica_lost_error())
    finally:
        parts.cancel()


def _prefix_identity(call: Call) -> bytes | None:
    """Return the prefix identity of a call, or None if it is no POST or its body is not JSON."""
    if call.method != "POST":
        return None
    try:
        return prefix_identity(json.loads(call.body))
    except (ValueError, RecursionError):
        return None


def build(settings: FleetSettings | Mapping[str, Any]) -> Any:
    """Return the application for `serve.run`. Raises `ConfigError` on invalid settings."""
    fleet = settings if isinstance(settings, FleetSettings) else FleetSettings.from_mapping(from_words(settings))
    router_kwargs = {"slots": fleet.spill.slots, "balance": fleet.balance} if fleet.routing == "prefix" else {}
    replicas = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=fleet.max_open_requests,
        max_queued_requests=fleet.max_open_requests,
        ray_actor_options={"num_cpus": fleet.num_cpus, "num_gpus": fleet.num_gpus},
        graceful_shutdown_timeout_s=fleet.shutdown_s,
        request_router_config={"request_router_class": ROUTERS[fleet.routing], "request_router_kwargs": router_kwargs},
        **fleet.scaling,
    )
    front = serve.deployment(
        Front,
        name="Front",
        max_ongoing_requests=fleet.max_open_requests * fleet.max_replicas,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas.bind(fleet), fleet.server_config.max_body_bytes)
