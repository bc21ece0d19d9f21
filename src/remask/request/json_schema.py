"""JSON Schema (draft 2020-12) as regular expressions of the JSON texts that it allows.

An expression matches nothing that the schema forbids. Where all that is allowed is no small expression it matches a
part of it: properties come in the order of the schema and no others are written, a schema that leads back to itself
does so a few times, and an object or list of which nothing is said holds scalars, and where it is the whole answer also
objects and lists of them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from remask.checks.values import shown
from remask.errors import ConfigError
from remask.request.schema_parts import BOUNDS, FORMATS, bounded, text_part

MAX_WRITTEN = 2**18
"""Characters of the expression of a schema."""
MAX_DEPTH = 32
MAX_REFERENCES = 64
MAX_VISITS = 2**12
"""Schemas, each as often as it is referred to, and what is looked at of them beside."""
TIMES = 4
"""How often a reference is followed within itself."""

WORKS: Mapping[str, str] = {
    "$anchor": "a name that `$ref` may refer to",
    "$defs": "schemas that `$ref` may refer to",
    "$ref": "`#`, a JSON pointer (`#/$defs/name`) or an anchor (`#name`) of the same schema; one that leads back to "
    f"itself is followed {TIMES} times",
    "additionalProperties": "without `properties` the values of an object of any names; beside them no others are "
    "written",
    "allOf": "one schema, beside others that restrict nothing",
    "anyOf": "as it is",
    "const": "as it is",
    "definitions": "older name of `$defs`",
    "enum": "as it is",
    "exclusiveMaximum": "as `maximum`",
    "exclusiveMinimum": "as `minimum`",
    "format": ", ".join(f"`{name}`" for name in FORMATS),
    "items": "also `false` behind `prefixItems`",
    "maxItems": "as it is",
    "maxLength": "not beside `pattern` or `format`",
    "maxProperties": "of objects of any names; of others where it forbids nothing",
    "maximum": "of integers, and of numbers where it is whole; written without exponents",
    "minItems": "as it is",
    "minLength": "not beside `pattern` or `format`",
    "minProperties": "0, or 1 of objects of any names; of others where it forbids nothing",
    "minimum": "of integers, and of numbers where it is whole; written without exponents",
    "oneOf": "branches of which each two exclude each other by the `const` or `enum` of one property, which is always "
    "written, or by their own",
    "pattern": "ECMA's, without lookaround, backreferences, and anchors in the middle; what it leaves open is written "
    "without escapes",
    "prefixItems": "all of them, if `minItems` and `maxItems` do not say otherwise",
    "properties": "in the order of the schema",
    "propertyNames": "of objects of any names",
    "required": "names of `properties`",
    "type": "one name, or a list of some; without it, the types that the other keywords are of",
}
"""Keywords that an answer follows, and how."""

ANNOTATIONS: Mapping[str, str] = {
    "$comment": "a note",
    "$id": "a name; a `$ref` within refers to places of the schema that has it",
    "$schema": "the draft",
    "default": "a note",
    "deprecated": "a note",
    "description": "a note",
    "discriminator": "OpenAPI's; what it says follows from `oneOf`",
    "example": "OpenAPI's note",
    "examples": "a note",
    "externalDocs": "OpenAPI's note",
    "readOnly": "a note",
    "title": "a note",
    "writeOnly": "a note",
    "xml": "OpenAPI's, of other texts than JSON",
}
"""Keywords that restrict nothing, and are ignored. So are all that begin with `x-`."""

REFUSED: Mapping[str, str] = {
    "$dynamicAnchor": "what it means depends on who refers to it; use $anchor",
    "$dynamicRef": "what it refers to depends on who refers to it; use $ref",
    "$vocabulary": "it is of schemas of schemas",
    "contains": "which item is meant is open; use prefixItems",
    "contentEncoding": "an encoded text has no expression; use pattern",
    "contentMediaType": "a text of another format has no expression; use pattern",
    "contentSchema": "JSON within a text has no expression; ask for the value itself",
    "dependentRequired": "which properties stand is settled one by one; use anyOf over whole objects",
    "dependentSchemas": "which properties stand is settled one by one; use anyOf over whole objects",
    "else": "what holds in one case only is an anyOf of whole schemas",
    "if": "what holds in one case only is an anyOf of whole schemas",
    "maxContains": "which items are meant is open; use prefixItems",
    "minContains": "which items are meant is open; use prefixItems",
    "multipleOf": "multiples are no small automaton; list them in enum",
    "not": "what an answer is not says little of what it is; use enum or anyOf",
    "patternProperties": "properties stand by their names; list them in properties, or use propertyNames",
    "then": "what holds in one case only is an anyOf of whole schemas",
    "unevaluatedItems": "what other schemas say is not counted; use items",
    "unevaluatedProperties": "what other schemas say is not counted; use additionalProperties",
    "uniqueItems": "an automaton cannot remember all items; use prefixItems",
}
"""Keywords of the draft that an answer might break, and the reason."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "additionalProperties": (True,),
    "items": (True,),
    "minItems": (0,),
    "minLength": (0,),
    "minProperties": (0,),
    "propertyNames": (True,),
    "required": ([],),
    "strict": (False, True),  # OpenAI's, where it has slipped into the schema
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "uniqueItems": (False,),
}
"""Values with which a keyword restricts nothing."""

_ALONE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")  # keywords that say all by themselves
_HOLDERS = frozenset(["$defs", "definitions"])
_KINDS = frozenset(["array", "boolean", "integer", "null", "number", "object", "string"])
_OF: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(BOUNDS, frozenset(["integer", "number"])),
    **dict.fromkeys(("format", "maxLength", "minLength", "pattern"), frozenset(["string"])),
    **dict.fromkeys(("items", "maxItems", "minItems", "prefixItems"), frozenset(["array"])),
    **dict.fromkeys(
        ("additionalProperties", "maxProperties", "minProperties", "properties", "propertyNames", "required"),
        frozenset(["object"]),
    ),
}
"""The types that a keyword restricts."""

_STRING = r'"([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])*"'
_INTEGER = r"-?(0|[1-9][0-9]*)"
_NUMBER = rf"{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_SCALAR = rf"({_STRING}|{_NUMBER}|true|false|null)"
_PERCENT = re.compile("(%[0-9A-Fa-f]{2})+")
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


_ENTRY = f"{_STRING}: ?"
_LIST = rf"\[({_SCALAR}(, ?{_SCALAR})*)?\]"
_OBJECT = rf"\{{({_ENTRY}{_SCALAR}(, ?{_ENTRY}{_SCALAR})*)?\}}"
_VALUE = f"({_SCALAR}|{_LIST}|{_OBJECT})"


def escaped(text: str) -> str:
    """The expression of `text` itself."""
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in text)


def expression_of(schema: Mapping[str, Any], place: str) -> str:
    """The expression of a schema, whose values are JSON's. `place` names it in errors.

    Raises `ConfigError` where it cannot be guaranteed, or allows nothing, and names the place in the schema.
    """
    return _Translation([id(schema)]).expression(schema, _At(place, schema, place, followed=frozenset([id(schema)])))


class _NothingError(ConfigError):
    """No value is allowed at a place, by what stands elsewhere. Around it there may be a way without one."""


@dataclass(frozen=True, slots=True)
class _At:
    """Where a schema stands.

    Attributes:
        root, root_place: the schema that its references refer to.
        kinds: types that are allowed by what stands around it.
        forced: properties that must be written.
        followed: identities of what references have led to that are of the same value.
        depth: how many schemas it stands in.
    """

    place: str
    root: Any
    root_place: str
    kinds: frozenset[str] = _KINDS
    forced: frozenset[str] = frozenset()
    followed: frozenset[int] = frozenset()
    depth: int = 0

    def within(self, name: str, key: str | int | None = None) -> "_At":
        """A schema within this one, of another value."""
        at = self.beside(name, key)
        return replace(at, kinds=_KINDS, forced=frozenset(), followed=frozenset())

    def beside(self, name: str, key: str | int | None = None) -> "_At":
        """A schema within this one, of the same value."""
        part = "" if key is None else f"[{key}]" if isinstance(key, int) else f".{_name(key)}"
        return replace(self, place=f"{self.place}.{name}{part}", depth=self.depth + 1)

    def forcing(self, names: frozenset[str]) -> "_At":
        """The same, where values are objects that have properties of these names."""
        return replace(self, forced=self.forced | names, kinds=self.kinds & {"object"}) if names else self


@dataclass(slots=True)
class _Translation:
    _following: list[int]  # identities of what references lead to, each within the one before
    _visits: int = 0
    _leaves: int = 0  # characters of values that hold no others
    # By the identity of the schema that is referred to.
    _targets: dict[tuple[int, str], tuple[Any, str]] = field(default_factory=dict)
    _anchors: dict[int, dict[str, Any]] = field(default_factory=dict)

    def expression(self, node: Any, at: _At) -> str:
        """The expression of the schema `node`. Raises `_NothingError` where it allows nothing."""
        node = self._entered(node, at)
        at = _rooted(node, at)
        kinds = _kinds(node, at.place)
        at = replace(at, kinds=kinds & at.kinds)
        alone = [name for name in _ALONE if name in node]
        if alone:
            beside = [name for name in node if _restricts(node, name) and name not in _HOLDERS | {"$anchor", "type"}]
            if len(beside) > 1 and set(beside) != {"enum", "const"}:
                raise ConfigError(f"{at.place} holds {' and '.join(sorted(beside))}, of which one alone is guaranteed")
            found = self._alone(alone[0], node, at)
        else:
            found = self._of_kinds(node, at)
        if len(found) > MAX_WRITTEN:
            raise _too_long(at.root_place)
        return found

    def _entered(self, node: Any, at: _At) -> Mapping[str, Any]:
        """The keywords of `node`. Raises `ConfigError` on those that would be overlooked."""
        self._visit(at, 1 + (len(node) // 16 if isinstance(node, Mapping) else 0))
        if at.depth > MAX_DEPTH:
            raise ConfigError(f"{at.root_place}: schemas are nested in more than {MAX_DEPTH} others")
        if node is False:
            raise _NothingError(f"{at.place} is false, which allows no value")
        if node is True:
            return {}
        if not isinstance(node, Mapping):
            raise ConfigError(f"{at.place} must be an object of keywords, true or false, got {shown(node)}")
        for name in node:
            if name in WORKS or name in ANNOTATIONS or name.startswith("x-") or not _restricts(node, name):
                continue
            raise ConfigError(
                f"{at.place} holds {_name(name)!r}, which cannot be guaranteed"
                + (f", as {REFUSED[name]}" if name in REFUSED else "; leave it out and check it yourself")
                + f". Understood: {', '.join(WORKS)}"
            )
        return node

    def _visit(self, at: _At, count: int = 1) -> None:
        self._visits += count
        if self._visits > MAX_VISITS:
            raise _too_long(at.root_place)

    def _leaf(self, text: str, at: _At) -> str:
        """`text`, which is a part of the expression. What is too long is not written to its end."""
        self._leaves += len(text)
        if self._leaves > 2 * MAX_WRITTEN:
            raise _too_long(at.root_place)
        return text

    def _alone(self, name: str, node: Mapping[str, Any], at: _At) -> str:
        if name == "$ref":
            return self._followed(node["$ref"], at)
        if name in ("const", "enum"):
            return self._leaf(_values(node, at), at)
        branches = [(at.beside(name, number), each) for number, each in enumerate(_listed(node, name, at.place))]
        if name == "oneOf":
            forced = self._exclusive(branches, at)
            branches = [(each.forcing(names), branch) for (each, branch), names in zip(branches, forced, strict=True)]
        elif name == "allOf":
            telling = [(each, branch) for each, branch in branches if not _says_nothing(branch)]
            if len(telling) > 1:
                raise ConfigError(
                    f"{at.place} holds 'allOf' of {len(telling)} schemas, which cannot be guaranteed, as an answer of "
                    "two schemas at once is none of either's expression; write one schema"
                )
            branches = telling or branches[:1]
        return _any(lambda at, each: self.expression(each, at), branches)

    def _followed(self, ref: object, at: _At) -> str:
        """What a reference leads to."""
        target, there = self._target(ref, at)
        if id(target) in at.followed:
            raise ConfigError(
                f"{at.place}: $ref {shown(ref)} refers to itself before any property or item, so that nothing could be "
                "checked by it; put it into one, or say what is meant"
            )
        there = replace(there, followed=at.followed | {id(target)})
        if self._following.count(id(target)) >= TIMES:
            raise _NothingError(
                f"{at.place}: $ref {shown(ref)} leads back to itself without a way out, so that no answer could end; "
                "leave a property on the way out of required, or allow null"
            )
        if len(self._following) >= MAX_REFERENCES:
            raise ConfigError(f"{at.place}: $ref {shown(ref)} is within more than {MAX_REFERENCES} other references")
        self._following.append(id(target))
        try:
            return self.expression(target, there)
        finally:
            self._following.pop()

    def _target(self, ref: object, at: _At) -> tuple[Any, _At]:
        """What a reference refers to, and where that stands. Raises `ConfigError` where there is no such place."""
        if not isinstance(ref, str):
            raise ConfigError(f"{at.place}: $ref must be a text such as '#/$defs/name', got {shown(ref)}")
        known = id(at.root), ref
        if known not in self._targets:
            self._targets[known] = self._looked_up(ref, at)
        target, place = self._targets[known]
        return target, replace(at, place=place)

    def _looked_up(self, ref: str, at: _At) -> tuple[Any, str]:
        document, _, fragment = ref.partition("#")
        if document and document != str(at.root.get("$id", "")).rstrip("#"):
            raise ConfigError(
                f"{at.place}: $ref {shown(ref)} refers to another schema, and no other is looked up; put it into "
                "$defs, and refer to it as '#/$defs/name'"
            )
        fragment = _PERCENT.sub(
            lambda found: bytes.fromhex(found[0].replace("%", "")).decode(errors="replace"), fragment
        )
        if fragment and not fragment.startswith("/"):
            if id(at.root) not in self._anchors:
                self._anchors[id(at.root)] = dict(_anchors(at.root))
            anchors = self._anchors[id(at.root)]
            if fragment not in anchors:
                raise _not_found(ref, at, "there is no such $anchor", anchors)
            return anchors[fragment], f"{at.root_place}#{_name(fragment)}"
        target, place = at.root, at.root_place
        for step in fragment.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            keys = {str(number): each for number, each in enumerate(target)} if isinstance(target, list) else target
            keys = keys if isinstance(keys, Mapping) else {}
            if key not in keys:
                raise _not_found(ref, at, f"{place} has no {_name(key)!r}", keys)
            place = f"{place}[{key}]" if isinstance(target, list) else f"{place}.{_name(key)}"
            target = keys[key]
        return target, place

    def _of_kinds(self, node: Mapping[str, Any], at: _At) -> str:
        """The values of the types that `node` and what stands around it allow, by the keywords of each type."""
        ways: Mapping[str, Callable[[Mapping[str, Any], _At], str]] = {
            "string": lambda node, at: self._leaf(_string(node, at), at),
            "number": lambda node, at: self._leaf(_number(node, at, whole="number" not in at.kinds), at),
            "boolean": lambda *_: "(true|false)",
            "null": lambda *_: "null",
            "array": self._array,
            "object": self._object,
        }
        kinds = {"number" if name == "integer" else name for name in at.kinds}
        if not kinds:
            raise _NothingError(f"{at.place} allows no type that what stands around it allows")
        return _any(lambda at, way: way(node, at), [(at, way) for name, way in ways.items() if name in kinds])

    def _array(self, node: Mapping[str, Any], at: _At) -> str:
        prefix = _listed(node, "prefixItems", at.place) if "prefixItems" in node else []
        if isinstance(node.get("items"), list):
            raise ConfigError(f"{at.place}.items must be one schema; a list of them is prefixItems")
        low, high = _sizes(node, "Items", at.place)
        first: list[str] = []
        rest: str | None = None
        try:
            for number, each in enumerate(prefix[:high]):
                first.append(self.expression(each, at.within("prefixItems", number)))
            if high is None or high > len(first):
                if "items" in node:
                    rest = self.expression(node["items"], at.within("items"))
                elif not prefix or low > len(prefix):
                    rest = _VALUE if at.depth == 0 and "object" not in at.kinds else _SCALAR
        except _NothingError as error:  # so a list ends before that item
            if low > len(first):
                raise _NothingError(f"{at.place}: a list has {low} items at least, but {error}") from error
        if rest is None:
            high = len(first)
        if "minItems" not in node:
            low = len(first)
        text = ""
        if rest is not None and high != 0:
            if not first:
                first = [rest]
            most = "" if high is None else high - len(first)
            text = rf"(,[ ]?({rest})){{{max(low - len(first), 0)},{most}}}"
        for number, each in reversed(list(enumerate(first))):
            text = f"{',[ ]?' if number else ''}({each}){text}"
            text = text if number < low else f"({text})?"
        return rf"\[[ ]?{text}[ ]?\]"

    def _object(self, node: Mapping[str, Any], at: _At) -> str:
        properties, extra = node.get("properties", {}), node.get("additionalProperties", True)
        if not isinstance(properties, Mapping):
            raise ConfigError(f"{at.place}.properties must be an object of schemas, got {shown(properties)}")
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ConfigError(f"{at.place}.required must be a list of names of properties, got {shown(required)}")
        missing = [name for name in required if name not in properties]
        if missing:
            raise ConfigError(f"{at.place} needs a schema for each property, such as {_name(missing[0])!r}")
        low, high = _sizes(node, "Properties", at.place)
        always = at.forced.union(required)
        if "properties" not in node or (not properties and isinstance(extra, Mapping)):
            return self._of_any_names(node, extra, low, high, at)
        if "propertyNames" in node and properties:
            raise ConfigError(f"{at.place}: properties and propertyNames are not guaranteed together; keep one of them")
        entries: list[tuple[str, bool]] = []
        for name, each in properties.items():
            needed = name in always
            try:
                value = self.expression(each, at.within("properties", name))
            except _NothingError:
                if needed:
                    raise
                continue
            entries.append((f"[ ]?{_written(name)}[ ]?:[ ]?{value}", needed))
        if low > sum(needed for _, needed in entries) or (high is not None and high < len(entries)):
            raise ConfigError(
                f"{at.place}: minProperties and maxProperties are guaranteed where required and properties say as "
                "much; leave them out, or say which properties are meant"
            )
        return rf"\{{{_entries(entries)}[ ]?\}}" if entries else r"\{\}"

    def _of_any_names(self, node: Mapping[str, Any], extra: Any, low: int, high: int | None, at: _At) -> str:
        """Objects whose properties have no schemas of their own."""
        if low > 1:  # JSON may say one name twice
            raise ConfigError(
                f"{at.place}: minProperties={low} of any names cannot be guaranteed, as two of them might be one; list "
                "them in properties, or ask for 1"
            )
        try:
            names = _STRING
            if "propertyNames" in node:
                names_at = replace(at.within("propertyNames"), kinds=frozenset(["string"]))
                names = self.expression(node["propertyNames"], names_at)
            if extra is True:
                value = _VALUE if at.depth == 0 else _SCALAR
            else:
                value = self.expression(extra, at.within("additionalProperties"))
        except _NothingError:
            if low:
                raise
            high = 0
        if high == 0:
            return r"\{\}"
        entry = f"({names}): ?({value})"
        most = "" if high is None else high - 1
        return rf"\{{({entry}(, ?{entry}){{0,{most}}}){'' if low else '?'}\}}"

    def _exclusive(self, branches: Sequence[tuple[_At, Any]], at: _At) -> list[frozenset[str]]:
        """For each branch of a `oneOf` the properties by which it excludes the others.

        Raises `ConfigError` where two branches might fit one value.
        """
        tags = [self._tags(each, beside, 0) for beside, each in branches]
        for name in tags[0]:  # as a rule one property tells all of them apart
            values = [each[name] for each in tags if name in each]
            if len(values) == len(tags) and len(frozenset().union(*values)) == sum(map(len, values)):
                return [frozenset([name]) if name else frozenset()] * len(tags)
        found: list[set[str]] = [set() for _ in branches]
        for one, other in combinations(range(len(branches)), 2):
            self._visit(at)
            shared = [name for name in tags[one] if name in tags[other] and not tags[one][name] & tags[other][name]]
            if not shared:
                raise ConfigError(
                    f"{at.place} holds 'oneOf', whose branches {one} and {other} might both fit, as no const or enum "
                    "of one property excludes the other; give each a property of its own const, or use anyOf"
                )
            if "" not in shared:
                found[one].add(shared[0])
                found[other].add(shared[0])
        return [frozenset(names) for names in found]

    def _tags(self, node: Any, at: _At, depth: int) -> dict[str, frozenset[str]]:
        """The values that each property may have at most, where a value has it; "" stands for the value itself."""
        self._visit(at)
        if depth > TIMES or not isinstance(node, Mapping):
            return {}
        at = _rooted(node, at)
        if "$ref" in node:
            return self._tags(*self._target(node["$ref"], at), depth + 1)
        if "const" in node or isinstance(node.get("enum"), list):
            values = [node["const"]] if "const" in node else node["enum"]
            self._visit(at, len(values) // 16)
            return {"": frozenset(map(_comparable, values))}
        for name in ("allOf", "anyOf", "oneOf"):
            given = node.get(name)
            branches = given if isinstance(given, list) else []
            if name == "allOf":
                branches = [each for each in branches if not _says_nothing(each)]
            if branches:
                each_of = [self._tags(branch, at, depth + 1) for branch in branches]
                shared = set.intersection(*(set(each) for each in each_of))
                return {tag: frozenset().union(*(each[tag] for each in each_of)) for tag in sorted(shared)}
        properties = node.get("properties")
        found = {}
        for name, each in properties.items() if isinstance(properties, Mapping) else ():
            own = self._tags(each, at, depth + 1)
            if name and "" in own:
                found[name] = own[""]
        return found


def _any(way: Callable[[_At, Any], str], given: Iterable[tuple[_At, Any]]) -> str:
    """What any of some schemas allows. Raises the first one's `_NothingError` where none allows anything."""
    found, nothing = list[str](), list[_NothingError]()
    for at, each in given:
        try:
            found.append(way(at, each))
        except _NothingError as error:
            nothing.append(error)
    if not found:
        raise nothing[0]
    return found[0] if len(found) == 1 else f"({'|'.join(dict.fromkeys(found))})"


def _restricts(node: Mapping[str, Any], name: str) -> bool:
    """Whether a keyword that is no annotation restricts anything."""
    if name in ANNOTATIONS or name.startswith("x-"):
        return False
    value = node[name]
    return not any(value == each and type(value) is type(each) for each in _NEUTRAL.get(name, ()))


def _says_nothing(node: Any) -> bool:
    return node is True or (isinstance(node, Mapping) and not any(_restricts(node, name) for name in node))


def _rooted(node: Mapping[str, Any], at: _At) -> _At:
    """`at`, where `node` has an `$id` of its own, which its references are relative to."""
    named = node.get("$id")
    if node is at.root or not isinstance(named, str) or named.startswith("#"):
        return at
    return replace(at, root=node, root_place=at.place)


def _kinds(node: Mapping[str, Any], place: str) -> frozenset[str]:
    """The types that a schema allows: those that it names, or else those that its keywords are of."""
    bears = {name: _OF[name] for name in node if name in _OF and _restricts(node, name)}
    if "type" not in node:
        return frozenset().union(*bears.values()) if bears else _KINDS
    given = node["type"]
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(each, str) and each in _KINDS for each in names):
        raise ConfigError(f"{place}.type must be one or some of {', '.join(sorted(_KINDS))}, got {shown(given)}")
    kinds = frozenset(names) | ({"integer"} if "number" in names else set())
    for name, needed in bears.items():
        if not kinds & needed and name != "additionalProperties":
            raise ConfigError(f"{place}: {name} needs the type {' or '.join(map(repr, sorted(needed)))}, got {given!r}")
    return kinds


def _values(node: Mapping[str, Any], at: _At) -> str:
    """The values of `enum` and `const`."""
    values = node.get("enum", [node.get("const")])
    if not isinstance(values, list):
        raise ConfigError(f"{at.place}.enum must be a list of values, got {shown(values)}")
    if "const" in node:
        values = [each for each in values if _comparable(each) == _comparable(node["const"])]
    if not values:
        raise ConfigError(f"{at.place}: enum holds no value that is allowed; list one at least")
    own = [each for each in values if "type" in node and not _is_of(each, _kinds(node, at.place))]
    if own:
        raise ConfigError(f"{at.place} holds a value that is not of its own type {node['type']!r}: {shown(own[0])}")
    kept = [each for each in values if _is_of(each, at.kinds)]
    if not kept:
        raise _NothingError(f"{at.place}: no value is of a type that what stands around it allows")
    return f"({'|'.join(dict.fromkeys(map(_written, kept)))})"


def _is_of(value: object, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        names = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}
        return names[type(value)] in kinds
    return "number" in kinds or ("integer" in kinds and (isinstance(value, int) or value.is_integer()))


def _comparable(value: Any) -> str:
    """A text that two values have in common where JSON Schema takes them to be equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_comparable, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{json.dumps(name)}:{_comparable(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)


def _written(value: Any) -> str:
    """The expression of a value as JSON, with a space or none behind commas, colons and brackets."""
    if isinstance(value, list) and value:
        within = r"[ ]?,[ ]?".join(map(_written, value))
        return rf"\[[ ]?{within}[ ]?\]"
    if isinstance(value, Mapping) and value:
        within = r"[ ]?,[ ]?".join(f"{_written(name)}[ ]?:[ ]?{_written(each)}" for name, each in value.items())
        return rf"\{{[ ]?{within}[ ]?\}}"
    text = json.dumps(value, ensure_ascii=False)
    # What is no character has no bytes, and what is not printed is safer as an escape.
    return escaped(re.sub(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text))


def _entries(entries: Sequence[tuple[str, bool]]) -> str:
    """Properties with commas between those that stand; the flag says which must."""
    first = next((number for number, (_, needed) in enumerate(entries) if needed), None)
    if first is None:
        return f"({_some([text for text, _ in entries])})?" if entries else ""
    before = "".join(f"({text}[ ]?,)?" for text, _ in entries[:first])
    behind = "".join(f"[ ]?,{text}" if needed else f"([ ]?,{text})?" for text, needed in entries[first + 1 :])
    return before + entries[first][0] + behind


def _some(texts: Sequence[str]) -> str:
    """One at least of `texts`, in their order, with commas between them."""
    if len(texts) == 1:
        return texts[0]
    half = len(texts) // 2
    rest = "".join(f"([ ]?,{text})?" for text in texts[half:])
    return f"(({_some(texts[:half])}){rest}|{_some(texts[half:])})"


def _string(node: Mapping[str, Any], at: _At) -> str:
    try:
        found = text_part(node)
    except ConfigError as error:
        raise ConfigError(f"{at.place}: {error}") from error
    low, high = _sizes(node, "Length", at.place)
    if found is not None:
        return found
    if low == 0 and high is None:
        return _STRING
    return f'{_STRING[:-2]}{{{low},{"" if high is None else high}}}"'


def _number(node: Mapping[str, Any], at: _At, *, whole: bool) -> str:
    if not any(name in node for name in BOUNDS):
        return _INTEGER if whole else _NUMBER
    try:
        found = bounded(node, whole=whole)
    except ConfigError as error:
        raise ConfigError(f"{at.place}: {error}") from error
    if found is None:
        raise ConfigError(f"{at.place}: {' and '.join(name for name in BOUNDS if name in node)} leave no number")
    return found


def _sizes(node: Mapping[str, Any], of: str, place: str) -> tuple[int, int | None]:
    """The values of `min` and `max` of something. Raises `ConfigError` where they contradict each other."""
    found: list[int | None] = []
    for name in (f"min{of}", f"max{of}"):
        value = node.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)
        if value is not None and not number:
            raise ConfigError(f"{place}.{name} must be a whole number from 0, got {shown(value)}")
        found.append(None if value is None else int(value))
    low, high = found[0] or 0, found[1]
    if high is not None and low > high:
        raise ConfigError(f"{place}: min{of}={low} and max{of}={high} leave no value")
    return low, high


def _listed(node: Mapping[str, Any], name: str, place: str) -> list[Any]:
    found = node[name]
    if not isinstance(found, list) or not (found or name == "prefixItems"):
        raise ConfigError(f"{place} holds {name!r}, which must be a list of one schema at least, got {shown(found)}")
    return found


def _anchors(root: Any) -> Iterable[tuple[str, Any]]:
    """The schemas of `root` that have an anchor, by its name."""
    held = [root]
    while held:
        node = held.pop()
        if isinstance(node, list):
            held += node
        elif isinstance(node, Mapping) and (node is root or not isinstance(node.get("$id"), str)):
            if isinstance(node.get("$anchor"), str):
                yield node["$anchor"], node
            held += [each for name, each in node.items() if name not in ("const", "default", "enum", "examples")]


def _not_found(ref: str, at: _At, what: str, there: Iterable[str]) -> ConfigError:
    names = [repr(_name(each)) for each in there]
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return ConfigError(f"{at.place}: $ref {shown(ref)} leads nowhere: {what}; there is {listed or 'nothing'}")


def _name(text: str) -> str:
    """A name from a schema, short enough for an error."""
    short = text if len(text) <= 60 else f"{text[:60]}..."
    return short if short.isprintable() else ascii(short)


def _too_long(place: str) -> ConfigError:
    return ConfigError(
        f"{place} is too long: it comes to more than {MAX_WRITTEN} characters of a regular expression, or to more than "
        f"{MAX_VISITS} schemas; ask for fewer or simpler values"
    )
