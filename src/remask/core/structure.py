"""The forms that a request may ask of its answer: a regular expression, one of some texts, or JSON of a schema."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remask.core.checks import Flag, ListOf, Settings, Text
from remask.core.fields import check, declare, parse
from remask.errors import ConfigError

MAX_PATTERN = 2**14
"""Characters of a regular expression, a schema, or all choices together."""

# What is understood of a schema, and what says nothing of the form. Another keyword would be overlooked.
_UNDERSTOOD = frozenset(
    [
        "$defs",
        "$ref",
        "anyOf",
        "const",
        "definitions",
        "enum",
        "items",
        "maxItems",
        "maxLength",
        "minItems",
        "minLength",
        "prefixItems",
        "properties",
        "required",
        "type",
    ]
)
_ANNOTATIONS = frozenset(
    ["$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"]
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"additionalProperties": (False, True), "strict": (False, True)}
_STRING = r'"([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])*"'
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_SCALAR = rf"({_STRING}|{_NUMBER}|true|false|null)"
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of an answer; one of the fields is set. Raises `ConfigError` when made, naming the field."""

    regex: str | None = declare(None, Text(MAX_PATTERN), "The whole answer matches this regular expression.")
    choice: Sequence[str] | None = declare(
        None, ListOf(Text(MAX_PATTERN), "texts", 1024), "The answer is one of these texts."
    )
    json: Mapping[str, Any] | None = declare(
        None, Settings("keywords of JSON Schema", 64), "The answer is JSON that this schema allows."
    )
    json_object: bool = declare(
        False, Flag(), "The answer is a JSON object. Its values are scalars, or lists and objects of scalars."
    )

    def __post_init__(self) -> None:
        check(self, "structured_outputs.")
        given = [name for name in ("regex", "choice", "json") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise ConfigError(
                "structured_outputs needs exactly one of regex, choice, json and json_object; got "
                + (", ".join(given) or "none")
            )
        if self.choice is not None and not self.choice:
            raise ConfigError("structured_outputs.choice holds no text; give one at least")
        if self.json is not None:
            _check_schema(self.json)
        if len(self.source[1]) > MAX_PATTERN:
            raise ConfigError(f"structured_outputs.{given[0]} is too long; at most {MAX_PATTERN} characters are taken")

    @classmethod
    def from_mapping(cls, values: object) -> "StructuredOutputs":
        """The form that JSON-like values say. Raises `ConfigError` on unknown names and on values not allowed."""
        return parse(cls, values, "structured_outputs", "structured_outputs field")

    @property
    def source(self) -> tuple[str, str]:
        """What is compiled: "regex" and an expression, or "json" and the text of a schema."""
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "regex", "|".join(map(_escaped, self.choice))
        if self.json is not None:
            return "json", json.dumps(self.json)
        return "regex", _object_of(f"({_SCALAR}|{_list_of(_SCALAR)}|{_object_of(_SCALAR)})")


def _list_of(value: str) -> str:
    return rf"\[({value}(, ?{value})*)?\]"


def _object_of(value: str) -> str:
    entry = f"{_STRING}: ?{value}"
    return rf"\{{({entry}(, ?{entry})*)?\}}"


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in text)


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Raise `ConfigError` on keywords that would be overlooked, so that an answer might break them."""
    for place, node in _nodes(schema, "structured_outputs.json", 0):
        for name, value in node.items():
            if name in _NEUTRAL and value in _NEUTRAL[name]:
                continue
            if name not in _UNDERSTOOD | _ANNOTATIONS:
                raise ConfigError(
                    f"structured_outputs.json: {place} holds {name!r}, which cannot be guaranteed; leave it out and "
                    f"check it yourself. Understood: {', '.join(sorted(_UNDERSTOOD))}"
                )
        _check_node(place, {name for name in node if name in _UNDERSTOOD}, node)


def _check_node(place: str, names: set[str], node: Mapping[str, Any]) -> None:
    """Raise `ConfigError` on keywords that are understood alone and not together, and on names without a schema."""
    alone = names & {"$ref", "anyOf", "enum", "const"}
    beside = names - {"$defs", "definitions"} - ({"type"} if alone <= {"enum", "const"} else set())
    if alone and len(beside) > 1:
        raise ConfigError(
            f"structured_outputs.json: {place} holds {' and '.join(sorted(beside))}, of which one alone is guaranteed"
        )
    values = node.get("enum", [node["const"]] if "const" in node else [])
    if "type" in node and any(not _is_of(value, node["type"]) for value in values):
        raise ConfigError(
            f"structured_outputs.json: {place} holds a value that is not of its own type {node['type']!r}"
        )
    missing = set(node.get("required", ())) - set(node.get("properties", ()))
    if missing or (node.get("additionalProperties") is False and "properties" not in node):
        raise ConfigError(
            f"structured_outputs.json: {place} needs a schema for each property"
            + "".join(f", such as {name!r}" for name in sorted(missing)[:1])
        )
    if "prefixItems" in node and names & {"minItems", "maxItems", "items"}:
        raise ConfigError(f"structured_outputs.json: {place}: prefixItems alone says the length of its list")


def _is_of(value: object, names: object) -> bool:
    kinds = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
    for name in [names] if isinstance(names, str) else names if isinstance(names, list) else []:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (name == "number" and number) or (name == "integer" and number and float(value).is_integer()):  # type: ignore[arg-type]
            return True
        if name in kinds and isinstance(value, kinds[name]):
            return True
    return False


def _nodes(node: object, place: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas within a schema, each with its place."""
    if depth > 32:
        raise ConfigError("structured_outputs.json: schemas are nested in more than 32 others")
    if not isinstance(node, Mapping):
        raise ConfigError(f"structured_outputs.json: {place} must be an object of keywords")
    yield place, node
    for name in ("properties", "$defs", "definitions"):
        within = node.get(name, {})
        if not isinstance(within, Mapping):
            raise ConfigError(f"structured_outputs.json: {place}.{name} must be an object of schemas")
        for key, each in within.items():
            yield from _nodes(each, f"{place}.{name}.{key}", depth + 1)
    if "items" in node:
        yield from _nodes(node["items"], f"{place}.items", depth + 1)
    for name in ("anyOf", "prefixItems"):
        for number, each in enumerate(node.get(name, ())):
            yield from _nodes(each, f"{place}.{name}[{number}]", depth + 1)
