"""Declared fields: what a declaration accepts, how it reads, and that `parse` and `check` follow it."""

from dataclasses import dataclass
from typing import Any

import pytest

from remask.checks.fields import Nested, check, declare, declared, parse
from remask.checks.values import LARGEST, SHOWN, Choice, Flag, ListOf, Real, Settings, Text, Values, Whole
from remask.errors import ConfigError, UnknownNameError
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms


@dataclass(frozen=True)
class Oven:
    rack: int | None = declare(None, Whole(1, 4), "Where the tray goes.", kinds=("masked", "uniform"), choice="place")
    degrees: float = declare(180.0, Real(0, 300, above=True), "How hot it is.")

    def __post_init__(self) -> None:
        check(self, "oven.")


# values, those that fit, those that do not
SETS: list[tuple[Values, list[Any], list[Any]]] = [
    (Whole(1, 4), [1, 4], [0, 5, 2.0, True, "2", None]),
    (Whole(0), [0, LARGEST], [-1, LARGEST + 1]),
    (Real(0, 1), [0, 1, 0.5], [-0.1, 1.1, float("nan"), True, "1"]),
    (Real(0, above=True), [1e-9, 7], [0, 0.0, float("inf"), 10**400]),
    (Flag(), [True, False], [0, 1, None, "yes"]),
    (Choice(("a", "b")), ["a", "b"], ["c", "", 3, ["a"]]),
    (Text(3), ["x", "xyz"], ["", "wxyz", 5, None, "\ud800"]),
    (Text(3, empty=True), ["x", ""], [5, "wxyz", "\udfff"]),
    (ListOf(Whole(0), "token ids", 2), [[], [0, 5], (1,)], [5, "12", [0, -1], [True], [1, 2, 3]]),
    (ListOf(Text(3), "texts", 2, single=True), ["a", [], ["a", "b"]], ["", [""], ["a", 3], 4, ["a"] * 3, ["wxyz"]]),
    (ListOf(ListOf(Whole(0), "places", 2), "lists", 2), [[[1], []]], [[1], [[-1]], {}, [[1, 2, 3]]]),
    (Settings("settings", 1), [{}, {"a": 1}], [[], "a", {1: 2}, {"a": 1, "b": 2}]),
    (Settings("settings", 1, 5), [{"ab": 1}, {"a": []}, {"a": [1, 2]}], [{"abcde": 1}, {"a": "wxyz"}, {"a": [[1, 2]]}]),
    (
        ListOf(ListOf(Whole(0), "places", 9), "lists", 9, total_limit=5),
        [[[1, 2]], [[], []]],
        [[[1, 2], [1]], [[1] * 5]],
    ),
    (Nested(Oven, "oven knob"), [Oven(), {}, {"rack": 2, "degrees": None}], [3, {"rack": 9}, {"tray": 1}]),
]


@pytest.mark.parametrize(("values", "good", "bad"), SETS, ids=[repr(values)[:40] for values, _, _ in SETS])
def test_what_fits(values: Values, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert values.fits(value)
        values.check("x", value)
    for value in bad:
        assert not values.fits(value), value
        with pytest.raises(ConfigError):
            values.check("x", value)


@pytest.mark.parametrize(
    ("values", "value", "message"),
    [
        (Whole(1, 4), 5, "x must be a whole number from 1 to 4, got 5"),
        (Whole(-LARGEST), 0.5, "x must be a whole number from -(2**63 - 1) to 2**63 - 1, got 0.5"),
        (Real(0, 1, above=True), 0, "x must be a number above 0 to 1, got 0"),
        (Real(0), "hot", "x must be a number from 0 up, got 'hot'"),
        (ListOf(Whole(0), "token ids", 9), [1, "a"], "x[1] must be a whole number from 0 to 2**63 - 1, got 'a'"),
        (ListOf(Whole(0), "token ids", 9), 5, "x must be a list of at most 9 token ids, got 5"),
        (ListOf(Whole(0), "token ids", 2), [1] * 3, "x holds 3 items; it must be a list of at most 2 token ids"),
        (Text(3), "wxyz", "x must be a text of valid Unicode that is not empty, of at most 3 characters, got 'wxyz'"),
        (Flag(), 1, "x must be true or false, got 1"),
        (Choice(("near", "far")), "nar", "Unknown x 'nar'. Did you mean 'near'? Available: far, near."),
        (Nested(Oven, "oven knob"), {"rack": 9}, "oven.rack must be a whole number from 1 to 4, got 9"),
        (Nested(Oven, "oven knob"), {"rak": 9}, "Unknown oven knob 'x.rak'. Did you mean 'rack'?"),
    ],
)
def test_errors_name_the_field_the_value_and_what_is_allowed(values: Values, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values.check("x", value)
    assert str(caught.value).startswith(message)


def test_long_values_are_cut_in_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        Whole(0).check("x", "y" * 10_000)
    assert len(str(caught.value)) < SHOWN + 100


def test_a_declaration_is_kept_with_its_field() -> None:
    fields = declared(Oven)
    assert list(fields) == ["rack", "degrees"]
    assert (fields["rack"].default, fields["rack"].choice, fields["degrees"].default) == (None, "place", 180.0)
    assert fields["rack"].description == "Where the tray goes. For masked and uniform models."
    assert fields["degrees"].description == "How hot it is."


def test_none_is_allowed_where_it_is_the_default() -> None:
    declared(Oven)["rack"].check("rack", None)
    with pytest.raises(ConfigError, match="degrees must be a number above 0 to 300, got None"):
        declared(Oven)["degrees"].check("degrees", None)


def test_parse() -> None:
    assert parse(Oven, {"rack": 3, "degrees": None}, "oven", "oven knob") == Oven(rack=3)
    with pytest.raises(ConfigError, match="oven must be an object of oven knobs, got 3"):
        parse(Oven, 3, "oven", "oven knob")
    with pytest.raises(UnknownNameError, match=r"Unknown oven knob 'degree'\. Did you mean 'degrees'"):
        parse(Oven, {"degree": 3}, "oven", "oven knob")


@pytest.mark.parametrize(
    ("values", "schema"),
    [
        (Whole(1, 4), {"type": "integer", "minimum": 1, "maximum": 4}),
        (Real(0, 1, above=True), {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        (Choice(("a", "b")), {"type": "string", "enum": ["a", "b"]}),
        (ListOf(Flag(), "flags", 3), {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}),
        (Text(5), {"type": "string", "minLength": 1, "maxLength": 5}),
        (
            Settings("settings", 2, 9),
            {"type": "object", "maxProperties": 2, "description": "an object of at most 2 settings and 9 characters"},
        ),
    ],
)
def test_schemas(values: Values, schema: dict[str, Any]) -> None:
    assert values.schema() == schema


def unbounded(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a schema that hold numbers, texts or lists of any size."""
    if "anyOf" in schema:
        return [part for each in schema["anyOf"] for part in unbounded(each)]
    kind = schema["type"]
    if kind == "string" and "enum" in schema:
        return []
    bounds = {"integer": "maximum", "number": "maximum", "string": "maxLength", "array": "maxItems"}
    open_ended = [schema] if kind in bounds and schema.get(bounds[kind], LARGEST) >= LARGEST else []
    nested = [schema["items"]] if kind == "array" else list(schema.get("properties", {}).values())
    return open_ended + [part for each in nested for part in unbounded(each)]


@pytest.mark.parametrize("cls", [SamplingParams, Terms])
def test_every_field_of_a_request_is_bounded(cls: type[Any]) -> None:
    known = {"seed", "priority"}  # any number is as good as another
    found = [name for name, field in declared(cls).items() if name not in known and unbounded(field.values.schema())]
    assert found == []
