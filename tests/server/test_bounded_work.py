"""How much is done for a body before it is answered or refused: counted, never timed."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from remask.checks.fields import Nested, declared
from remask.checks.values import LIST, ListOf, Values, Whole, count_values
from remask.errors import ConfigError
from remask.request import forms as structure
from remask.request import json_schema, schema_parts
from remask.request.forms import MAX_PATTERN, StructuredOutputs
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Part, Terms
from remask.server.bodies import count_items, read_body
from remask.server.errors import ApiError
from remask.server.protocol.generation import ChatBody, CompletionBody
from tests.server.serving import Running

COMPLETIONS = "/v1/completions"


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> Iterator[Counter[str]]:
    """Count the calls of a function of a module or class."""
    calls: Counter[str] = Counter()
    plain = getattr(holder, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, call)
        yield calls


def refused(body: type[BaseModel], fields: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, ValidationError)) as error:
        body.model_validate(fields)
    return str(error.value)


def test_each_part_of_a_canvas_is_made_once_after_tokens_of_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"token_ids": [5]}] * 49 + [{"mask": 1}]
    with counted(monkeypatch, Part, "__post_init__") as calls:
        assert "altogether" in refused(CompletionBody, {"prompt": "a", "canvas": [{"token_ids": [1] * 1000}] * 1000})
        assert not calls
        body = CompletionBody.model_validate({"prompt": "a", "canvas": parts})
        for _ in range(3):
            assert body.terms.canvas is not None
    assert calls["__post_init__"] == len(parts)


def test_the_terms_of_a_body_are_made_once_or_refused_at_every_access() -> None:
    for body, own in (
        (ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
        (CompletionBody, {"prompt": "a"}),
    ):
        made: Any = body.model_validate(own | {"cache": "none", "priority": 3})
        assert made.terms is made.terms
        assert made.terms.priority == 3
    wrong = CompletionBody.model_validate({"prompt": "a", "logprobs": 2, "top_logprobs": 3})
    for _ in range(2):
        with pytest.raises(ConfigError, match="two names of one thing"):
            _ = wrong.terms


LONG_SCHEMAS: dict[str, dict[str, Any]] = {
    "a pattern": {"type": "string", "pattern": "(a|b)" * 200_000},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(120_000)}},
    "prefix items": {"type": "array", "prefixItems": [{"type": "null"}] * 200_000},
    "an enum": {"enum": list(range(100_000))},
}


@pytest.mark.parametrize("name", LONG_SCHEMAS)
def test_a_schema_that_is_too_long_is_refused_before_it_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        counted(monkeypatch, schema_parts, "string_pattern") as patterns,
        counted(monkeypatch, structure, "expression_of") as schemas,
        pytest.raises(ConfigError, match=str(MAX_PATTERN)),
    ):
        StructuredOutputs(json=LONG_SCHEMAS[name])
    assert not patterns
    assert not schemas


def test_a_schema_is_translated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "a+"} for i in range(20)}}
    with counted(monkeypatch, schema_parts, "string_pattern") as calls:
        form = StructuredOutputs(json=schema)
        for _ in range(5):
            assert "p19" in form.source.expression
    assert calls["string_pattern"] == 20


DEEP: dict[str, Any] = {f"d{n}": {"properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "abc"}} for n in range(20)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": r"\s" * 5000},
        {"anyOf": [{"type": "string", "pattern": r"\s" * 500}, {"type": "string", "pattern": r"\S" * 4500}]},
        {"$defs": DEEP | {"d20": {"type": "null"}}, "$ref": "#/$defs/d0"},
        {"anyOf": [{"$ref": "#/$defs/a"}] * 600, "$defs": {"a": {"pattern": r"\s" * 1700}}},
        {"oneOf": [{"$ref": "#/$defs/a"}] * 500, "$defs": {"a": {"enum": list(range(1500))}}},
        {"anyOf": [{"$ref": "#/$defs/a"}] * 300, "$defs": {"a": {"items": {f"x-{n}": 1 for n in range(600)}}}},
        {"$defs": {"d": {"properties": {k: {"$ref": "#/$defs/d"} for k in "abcdefghijklmn"}}}, "$ref": "#/$defs/d"},
    ],
)
def test_what_a_short_schema_comes_to_is_bounded(schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        counted(monkeypatch, json_schema, "_restricts") as keywords,
        counted(monkeypatch, json_schema, "_canonical_text") as values,
        counted(monkeypatch, schema_parts, "string_pattern") as patterns,
        pytest.raises(ConfigError, match="is too long: it comes to more than"),
    ):
        StructuredOutputs(json=schema)
    assert keywords.total() + values.total() <= 20 * json_schema.MAX_VISITS
    assert patterns.total() <= 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("initial_canvas", [1] * (LIST + 1)),
        ("order", [[1]] * LIST),
        ("order", [[1] * 1000] * 1000),
        ("canvas", [{"token_ids": [1] * 1000}] * 1000),
        ("canvas", [{"token_ids": [1] * (LIST + 1)}]),
        ("cache_config", {"a": [0] * 100_000}),
        ("cache_config", {"a": "x" * 100_000}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_long_lists_are_refused_before_an_item_is_looked_at(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(monkeypatch, Whole, "fits") as calls:
        assert name in refused(CompletionBody, {"prompt": "a", name: value})
    assert not calls


def lists_within(values: Values, most: int | None = None) -> Iterator[tuple[ListOf, int]]:
    """The lists of a declaration, nested ones included, each with the most values that the outer ones leave it."""
    if isinstance(values, ListOf):
        bounds = [bound for bound in (values.total_limit, most) if bound is not None]
        within = min(bounds, default=None) if bounds else None
        yield values, values.limit if within is None else min(values.limit, within)
        yield from lists_within(values.values, within)
    elif isinstance(values, Nested):
        for each in declared(values.cls).values():
            yield from lists_within(each.values, most)


@pytest.mark.parametrize("cls", [SamplingParams, Terms])
def test_every_declared_list_and_all_within_it_are_bounded(cls: type[Any]) -> None:
    """Also lists of lists: without a bound of all values together they could hold the product of two bounds."""
    for name, declaration in declared(cls).items():
        for values, most in lists_within(declaration.values):
            assert most <= 4 * LIST, name
            inner = [each for each, _ in lists_within(values.values)]
            assert not inner or values.total_limit is not None, name


def test_counting_ends_beyond_its_bound() -> None:
    visited = 0

    class Counting(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal visited
            for item in list.__iter__(self):
                visited += 1
                yield item

    assert count_values(Counting([Counting([1] * 10)] * 1000), 100) == 101
    assert visited <= 100
    assert count_values({"ab": ["cd", 1, None]}, 100) == 5
    assert count_values({"ab": ["cd", 1, None]}, 100, texts=True) == 9


@pytest.mark.parametrize(
    "value",
    [[], {}, "a,b[{", 1, [1, 2, [3, "x"]], {"a": [True, None], "b": {"c": '\\" , [ { \n'}}, [[[]]], [-1.5e3, ""]],
    ids=json.dumps,
)
def test_values_of_a_text_are_counted_without_parsing_it(value: Any) -> None:
    def held(node: Any) -> int:
        if isinstance(node, dict):
            return 1 + len(node) + sum(map(held, node.values()))
        return 1 + (sum(map(held, node)) if isinstance(node, list) else 0)

    for text in (json.dumps(value), json.dumps(value, indent=2)):
        assert count_items(text, 0) == 1
        padded = text + " " * 1000  # no text is shorter than the bound
        assert count_items(padded, 100) == held(value)


@pytest.mark.parametrize("item", [b"[]", b"{}", b"1", b'""'])
def test_a_body_of_too_many_values_is_a_413_before_it_is_parsed(
    server: Running, monkeypatch: pytest.MonkeyPatch, item: bytes
) -> None:
    most = server.service.config.max_body_items
    body = b'{"prompt": "a", "metadata": [' + (item + b",") * most + b"0]}"
    for encoding in ("utf-8", "utf-16", "utf-32-le"):
        encoded = body.decode().encode(encoding)
        with counted(monkeypatch, json, "loads") as calls, pytest.raises(ApiError, match="max_body_items"):
            read_body(CompletionBody, encoded, most)
        assert not calls
    response = server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert "max_body_items" in response.json()["error"]["message"]
    assert server.client.get("/ping").status_code == 200
