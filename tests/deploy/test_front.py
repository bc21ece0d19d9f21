"""The front and the routers of a Ray Serve application, without a cluster. Needs Ray to be installed."""

import asyncio
import importlib.util
import json
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from remask.deploy.asgi import REPLICA_HEADER, Call, Head
from remask.deploy.routing import prefix_identity, rank_replicas
from remask.errors import EngineDeadError

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: make test EXTRAS=dev,ray", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own use of pydantic
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
    from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError

    from remask.deploy.app import MAX_ATTEMPTS, Front, build
    from remask.deploy.router import PrefixRouter, RoundRobinRouter

CHAT = {"messages": [{"role": "system", "content": "rules"}, {"role": "user", "content": "go"}]}


class Parts:
    """What a handle gives."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts, self.cancelled = iter(parts), False

    def __aiter__(self) -> "Parts":
        return self

    async def __anext__(self) -> Any:
        part = next(self.parts, None)
        if part is None:
            raise StopAsyncIteration
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A deployment handle that notes what it was called with. Calls get the parts in turn, and then the last ones."""

    def __init__(self, *parts: Parts) -> None:
        self.parts, self._turns = parts[-1], list(parts)
        self.calls: list[tuple[bytes | None, Call]] = []

    def options(self, **_options: Any) -> "Handle":
        return self

    def remote(self, identity: bytes | None, call: Call) -> Parts:
        self.calls.append((identity, call))
        return self._turns.pop(0) if len(self._turns) > 1 else self.parts


def ask(handle: Handle, body: bytes, method: str = "POST", path: str = "/p", query: bytes = b"a=1") -> Any:
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": [(b"x", b"y")]}
    scope |= {"server": ("h", 1), "scheme": "http", "client": ("1.2.3.4", 5)}

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> Any:
        response = await Front(handle, max_body_bytes=1000)(Request(scope, receive))
        iterator = getattr(response, "body_iterator", None)
        return response, None if iterator is None else [part async for part in iterator]

    return asyncio.run(run())


def test_the_front_names_the_prefix_and_streams_through() -> None:
    handle = Handle(Parts([Head(201, ((b"k", b"v"),)), b"one", b"two"]))
    response, parts = ask(handle, json.dumps(CHAT).encode())
    assert (response.status_code, response.raw_headers, parts) == (201, [(b"k", b"v")], [b"one", b"two"])
    ((identity, call),) = handle.calls
    assert identity == prefix_identity(CHAT) is not None
    assert (call.method, call.path, call.query, call.client) == ("POST", "/p", b"a=1", ("1.2.3.4", 5))
    assert call.header(b"x") == "y"
    assert handle.parts.cancelled


def test_a_path_and_a_query_are_passed_on_as_they_are() -> None:
    handle = Handle(Parts([Head(200, ()), b"one"]))
    ask(handle, b"", "GET", "/v1/models/a#1?", query=b"a=\xff")
    ((_, call),) = handle.calls
    assert (call.path, call.query) == ("/v1/models/a#1?", b"a=\xff")


def test_a_body_in_many_small_pieces_is_copied_once() -> None:
    """And a larger one is cut behind the byte that shows its replica that it is too large."""
    front = Front(Handle(Parts([])), max_body_bytes=1 << 24)

    async def read(piece: bytes, count: int) -> bytes:
        messages = iter([{"type": "http.request", "body": piece, "more_body": left > 0} for left in range(count)][::-1])

        async def receive() -> Any:
            return next(messages)

        return await front._read_body(Request({"type": "http", "method": "POST", "headers": []}, receive))

    start = time.process_time()
    assert asyncio.run(read(b"x" * 2048, 1 << 13)) == b"x" * (1 << 24)
    assert time.process_time() - start < 1, "copies of all that came before take five seconds"
    assert len(asyncio.run(read(b"x" * 2048, (1 << 13) + 5))) == (1 << 24) + 1


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 900])
def test_bodies_without_a_prefix_go_anywhere(body: bytes) -> None:
    handle = Handle(Parts([Head(400, ())]))
    ask(handle, body)
    assert handle.calls[0][0] is None
    other = Handle(Parts([Head(405, ())]))
    ask(other, json.dumps(CHAT).encode(), "GET")
    assert other.calls[0][0] is None


def test_a_body_is_cut_where_replicas_refuse_it() -> None:
    handle = Handle(Parts([Head(413, ())]))
    ask(handle, b"x" * 5000)
    assert len(handle.calls[0][1].body) == 1001


def test_a_full_fleet_is_a_429() -> None:
    response, _ = ask(Handle(Parts([BackPressureError(9, 9)])), b"{}")
    assert response.status_code == 429
    assert json.loads(response.body)["error"]["code"] == "queue_full"
    response, _ = ask(Handle(Parts([BackPressureError(9, 9)])), b"{}", path="/v1/messages")
    assert json.loads(response.body)["type"] == "error", "in Anthropic's form"


DEAD = RayTaskError("answer", "a traceback", EngineDeadError("rank 1 of 2 was killed by signal 9"))
LOST = [
    ActorDiedError(),
    ActorUnavailableError("gone", b"a" * 16),
    ReplicaUnavailableError("r"),
    DEAD.as_instanceof_cause(),  # as Ray raises it here
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_request_whose_replica_is_lost_before_it_answers_runs_on_another(error: Exception) -> None:
    handle = Handle(Parts([error]), Parts([Head(200, ()), b"{}"]))
    response, parts = ask(handle, json.dumps(CHAT).encode())
    assert (response.status_code, parts) == (200, [b"{}"])
    first, second = handle.calls
    assert first == second


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_request_that_loses_every_replica_ends_with_an_error(error: Exception) -> None:
    handle = Handle(Parts([error] * MAX_ATTEMPTS))
    response, _ = ask(handle, json.dumps(CHAT).encode())
    assert len(handle.calls) == MAX_ATTEMPTS
    assert response.status_code == 503
    assert json.loads(response.body)["error"]["code"] == "replica_lost"


def test_a_stream_whose_replica_is_lost_ends_with_an_error_event() -> None:
    events = Head(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
    handle = Handle(Parts([events, b"data: {}\n\n", ActorDiedError()]))
    _, (first, last) = ask(handle, json.dumps(CHAT).encode())
    error, done = last.decode().strip().split("\n\n")
    assert (first, done) == (b"data: {}\n\n", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(handle.calls) == 1, "its client has read a part of the answer"
    assert handle.parts.cancelled


def test_another_body_is_cut_off_where_its_replica_is_lost() -> None:
    with pytest.raises(ActorDiedError):
        ask(Handle(Parts([Head(200, ()), b"{", ActorDiedError()])), b"{}")


def router(kind: Any, **settings: Any) -> Any:
    """A router outside of a cluster, where no other router sends anything."""
    made = kind.__new__(kind)
    made._replica_queue_len_cache = {}
    made.initialize_state(**settings)
    return made


def choose(made: Any, names: list[str], identity: bytes | None, wanted: str | None = None) -> list[str]:
    headers = () if wanted is None else ((REPLICA_HEADER, wanted.encode()),)
    pending = SimpleNamespace(
        args=[identity, Call("POST", "/", b"", headers, b"")], routing_context=SimpleNamespace(should_backoff=False)
    )
    replicas = [SimpleNamespace(replica_id=Name(name)) for name in names]
    ranks = asyncio.run(made.choose_replicas(replicas, pending))
    assert pending.routing_context.should_backoff
    assert all(len(each) == 1 for each in ranks)
    return [each[0].replica_id.unique_id for each in ranks]


class Name(str):
    @property
    def unique_id(self) -> str:
        return str(self)


def test_prefixes_are_ranked_and_spill_over() -> None:
    made = router(PrefixRouter, slots=2, balance=1.25)
    names = ["a", "b", "c"]
    home, second, third = rank_replicas(b"p", names)
    assert choose(made, names, b"p") == [home, second, third]
    made.replica_queue_len_cache[Name(home)] = 2
    assert choose(made, names, b"p") == [second, third, home]
    assert choose(made, names, None)[-1] == home
    assert choose(made, names, b"p", home) == [home]
    assert len(choose(made, names, b"p", "nobody")) == 3
    made.replica_queue_len_cache[Name(home)] = 1
    assert choose(made, names, b"p")[0] == home


def test_turns_of_round_robin() -> None:
    made = router(RoundRobinRouter)
    assert [choose(made, ["b", "a"], b"p")[0] for _ in range(4)] == ["a", "b", "a", "b"]
    assert choose(made, ["b", "a"], b"p", "b") == ["b"]


def test_the_application_is_built_from_names() -> None:
    assert build({"model": "bundled-tariff", "max_replicas": 2}) is not None
    assert build({"routing": "round-robin"}) is not None
    assert build({"max_replicas": "2"}) is not None, "all that stands on Serve's command line is text"
