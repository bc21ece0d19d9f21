"""Each value of a body has a bound where it is declared, and work grows in proportion to what a body holds.

Work is counted in calls of functions, never timed. A soak sends bodies at their real bounds to a server and times those
who ask meanwhile.
"""

import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from fastapi.routing import APIRoute

from remask.checks.values import weight
from remask.server.app import create_app, router
from remask.server.bodies import read_body
from remask.server.config import ServerConfig
from remask.server.errors import ApiError
from tests.server.largest import RIGHT, Bounds, body_schemas, largest_bodies, unbounded
from tests.server.serving import Running, make_llm, serving

MODELS: dict[str, Any] = {
    route.path: route.body_field.field_info.annotation
    for route in router().routes
    if isinstance(route, APIRoute) and route.body_field is not None
}
CALLS = 30  # for a value, at most
FIXED = 3000  # for a body, however small


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = create_app(make_llm(), ServerConfig(model_names=["a"])).openapi()
    return found


def calls(work: Callable[[], object]) -> int:
    """How many functions are called."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    except ApiError:
        pass
    finally:
        sys.setprofile(None)
    return count


def test_every_endpoint_is_known(document: dict[str, Any]) -> None:
    assert {path for path, _ in body_schemas(document)} <= MODELS.keys()
    for path, body in RIGHT.items():
        read_body(MODELS[path], json.dumps(body).encode(), 1000)


def test_every_value_has_a_bound(document: dict[str, Any]) -> None:
    found = [each for path, schema in body_schemas(document) for each in unbounded(document, schema, path)]
    assert found == []
    text = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}, "maxItems": 3}}}
    assert list(unbounded({}, text, "")) == [".a[]: string", ": object"]


@pytest.mark.parametrize(
    ("items", "deep"), [(50, 0), (400, 0), (50, 1), (8, 3), (20, 3), pytest.param(150, 1, marks=pytest.mark.thorough)]
)
def test_what_is_done_for_a_body_grows_with_its_values(document: dict[str, Any], items: int, deep: int) -> None:
    """Alone, with all that it holds, and some levels down."""
    worst, seen = "", 0.0
    for path, name, body in largest_bodies(document, Bounds(items, items), deep):
        content = json.dumps(body).encode()
        values = weight(body, 1 << 30)
        done = calls(lambda path=path, content=content: read_body(MODELS[path], content, 1 << 19))  # type: ignore[misc]
        share = done / (CALLS * values + FIXED)
        if share > seen:
            worst, seen = f"{path} {name}: {done} calls for {values} values", share
    assert 0 < seen < 1, worst


@pytest.mark.soak
def test_whoever_asks_meanwhile_is_answered(document: dict[str, Any]) -> None:
    """Every body at its real bounds, by three clients at once; beside them a canary, and `/ping`."""
    most = (Bounds(1 << 18, 1 << 20), 0), (Bounds(400, 400), 1), (Bounds(40, 40), 3)
    bodies = [
        (path, name, content)
        for bounds, deep in most
        for path, name, body in largest_bodies(document, bounds, deep)
        if len(content := json.dumps(body).encode()) < 4 << 20
    ]
    with serving() as running:
        expected = running.ask(max_tokens=8, seed=1).json()["choices"]
        before = waits(running, expected, lambda: False, 40)
        statuses: Counter[int] = Counter()
        left = iter(bodies)
        lock = threading.Lock()

        def send() -> None:
            while True:
                with lock:
                    path, _, content = next(left, ("", "", b""))
                if not path:
                    return
                header = {"Content-Type": "application/json"}
                status = running.client.post(path, content=content, headers=header, timeout=None).status_code
                with lock:
                    statuses[status] += 1

        senders = [threading.Thread(target=send) for _ in range(3)]
        for each in senders:
            each.start()
        during = waits(running, expected, lambda: not any(each.is_alive() for each in senders), None)
        assert set(statuses) <= {200, 400, 404, 413, 422, 429}, statuses
        running.settle()
    print(f"\n{len(bodies)} bodies: {dict(statuses)}")
    for what in ("canary", "/ping"):
        print(f"{what}: alone {summary(before[what])}, beside them {summary(during[what])}")


def waits(running: Running, expected: Any, ended: Callable[[], bool], times: int | None) -> dict[str, list[float]]:
    """Seconds of the canary's answers, which must be right, and of `/ping`, until `ended` or so many `times`."""
    found: dict[str, list[float]] = {"canary": [], "/ping": []}
    while not ended() and (times is None or len(found["canary"]) < times):
        start = time.perf_counter()
        assert running.client.get("/ping").status_code == 200
        middle = time.perf_counter()
        told = running.ask(max_tokens=8, seed=1)
        assert told.status_code == 200
        assert told.json()["choices"] == expected
        found["/ping"].append(middle - start)
        found["canary"].append(time.perf_counter() - middle)
    return found


def summary(seconds: list[float]) -> str:
    """The median, the 99th percentile and the largest, in milliseconds."""
    ordered = sorted(seconds)
    figures = statistics.median(ordered), ordered[int(0.99 * len(ordered))], ordered[-1]
    return ", ".join(f"{1e3 * each:.0f}" for each in figures) + f" ms of {len(ordered)}"
