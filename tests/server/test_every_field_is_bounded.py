"""Each value of a body has a bound where it is declared, and work grows in proportion to what a body holds.

Work is counted in calls of functions, never timed. `test_hostile_soak.py` sends bodies at their real bounds.
"""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from fastapi.routing import APIRoute

from remask.checks.values import count_values
from remask.server.app import create_app, router
from remask.server.bodies import read_body
from remask.server.config import ServerConfig
from remask.server.errors import ApiError
from tests.server.largest import RIGHT, Bounds, body_schemas, largest_bodies, unbounded
from tests.server.serving import make_llm

MODELS: dict[str, Any] = {
    route.path: route.body_field.field_info.annotation
    for route in router().routes
    if isinstance(route, APIRoute) and route.body_field is not None
}
CALLS = 50  # for a value, at most
FIXED = 3000  # for a body, however small


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = create_app(make_llm(), ServerConfig(model_names=["a"])).openapi()
    return found


def calls(work: Callable[[], object]) -> int:
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
        values = count_values(body, 1 << 30)
        done = calls(lambda path=path, content=content: read_body(MODELS[path], content, 1 << 19))  # type: ignore[misc]
        share = done / (CALLS * values + FIXED)
        if share > seen:
            worst, seen = f"{path} {name}: {done} calls for {values} values", share
    assert 0 < seen < 1, worst
