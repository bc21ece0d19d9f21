"""The forms that a request may ask of its answer: a regular expression, one of some texts, or JSON of a schema."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from remask.checks.fields import check, declare, parse
from remask.checks.values import Flag, ListOf, Settings, Text
from remask.errors import ConfigError
from remask.request.schema_parts import BOUNDS, STRINGS, part

MAX_PATTERN = 2**14
"""Characters of a regular expression, a schema as it is sent, or all choices together."""
MAX_WRITTEN = 2**18
"""Characters of all expressions that the patterns, formats and bounds of a schema come to."""

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
        *BOUNDS,
        *STRINGS,
    ]
)
_ANNOTATIONS = frozenset(
    ["$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"]
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "additionalProperties": (False, True),
    "minProperties": (0,),
    "strict": (False, True),
    "uniqueItems": (False,),
}
_REASONS: Mapping[str, str] = {
    "allOf": "an answer of two schemas at once is none of either's expression; write one schema",
    "contains": "which item is meant is open; use prefixItems",
    "dependentRequired": "which properties stand is settled one by one; use anyOf over whole objects",
    "if": "what holds in one case only is an anyOf of whole schemas",
    "multipleOf": "multiples are no small automaton; list them in enum",
    "not": "what an answer is not says little of what it is; use enum or anyOf",
    "oneOf": "that only one of some schemas fits cannot be seen from one of them; use anyOf",
    "patternProperties": "properties stand by their names; list them in properties",
    "uniqueItems": "an automaton cannot remember all items; use prefixItems",
}
_SCHEMAS = frozenset(["items", "anyOf", "prefixItems"])  # keywords whose values are schemas
_HOLDERS = _SCHEMAS | {"properties", "$defs", "definitions"}  # and those that hold schemas by name
_STRING = r'"([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])*"'
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_SCALAR = rf"({_STRING}|{_NUMBER}|true|false|null)"
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an answer; one of the fields is set. Raises `ConfigError` when made, naming the field."""

    regex: str | None = declare(None, Text(MAX_PATTERN), "The whole answer matches this regular expression.")
    choice: Sequence[str] | None = declare(
        None, ListOf(Text(MAX_PATTERN), "texts", 1024), "The answer is one of these texts."
    )
    json: Mapping[str, Any] | None = declare(
        None, Settings("keywords of JSON Schema", 64, MAX_PATTERN), "The answer is JSON that this schema allows."
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
        if sum(map(len, self.parts.values())) > MAX_WRITTEN:
            raise ConfigError(
                "structured_outputs.json is too long: the expressions of its patterns, formats and bounds have more "
                f"than {MAX_WRITTEN} characters; ask for fewer or shorter ones"
            )
        if len(self.source[1]) > MAX_PATTERN:
            raise ConfigError(f"structured_outputs.{given[0]} is too long; at most {MAX_PATTERN} characters are taken")

    @classmethod
    def from_mapping(cls, values: object) -> "StructuredOutputs":
        """The form that JSON-like values say. Raises `ConfigError` on unknown names and on values not allowed."""
        if isinstance(values, Mapping) and values.get("grammar") is not None:
            raise ConfigError(
                "structured_outputs.grammar: a context-free grammar has no finite automaton, so that no path through "
                "it could be found in any order; write its texts up to some depth as regex, json or choice"
            )
        return parse(cls, values, "structured_outputs", "structured_outputs field")

    @cached_property
    def source(self) -> tuple[str, str]:
        """The kind and text to compile: "regex" and an expression, or "json" and a schema."""
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "regex", "|".join(map(_escaped, self.choice))
        if self.json is not None:
            return "json", json.dumps(self._parted[0])
        return "regex", _object_of(f"({_SCALAR}|{_list_of(_SCALAR)}|{_object_of(_SCALAR)})")

    @property
    def parts(self) -> Mapping[str, str]:
        """Names that replace values of these regular expressions in the text of a schema."""
        return {} if self.json is None else self._parted[1]

    @cached_property
    def _parted(self) -> tuple[Any, dict[str, str]]:
        """The schema with names in place of what `schema_parts` makes expressions of, and these."""
        # No value of the schema holds its own hash, so a name stands for nothing else.
        own = sha256(json.dumps(self.json).encode()).hexdigest()
        found: dict[str, str] = {}

        def parted(node: Any, nodes: bool) -> Any:
            """`nodes`: it is a schema, and not a mapping or list of some, or a value."""
            if isinstance(node, list | tuple):
                return [parted(each, nodes) for each in node]
            if not isinstance(node, Mapping):
                return node
            if nodes and (expression := part(node)) is not None:
                return {"const": found_name(expression)}
            return {
                name: parted(each, not nodes or name in _SCHEMAS) if not nodes or name in _HOLDERS else each
                for name, each in node.items()
            }

        def found_name(expression: str) -> str:
            name = f"part{len(found)}x{own}"
            found[name] = expression
            return name

        return parted(self.json, nodes=True), found


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
                    f"structured_outputs.json: {place} holds {name!r}, which cannot be guaranteed"
                    + (f", as {_REASONS[name]}" if name in _REASONS else "; leave it out and check it yourself")
                    + f". Understood: {', '.join(sorted(_UNDERSTOOD))}"
                )
        try:
            part(node)
        except ConfigError as error:
            raise ConfigError(f"structured_outputs.json: {place}: {error}") from error
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
