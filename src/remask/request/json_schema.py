"""JSON Schema (draft 2020-12) as regular expressions of the JSON texts that it allows.

An expression matches nothing that the schema forbids. If everything that the schema allows would be too large an
expression, it matches a part of it: properties come in the order of the schema and no others are written, recursion is
limited, and an unrestricted object or list holds scalars (the whole answer also objects and lists of scalars).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from remask.checks.values import count_values, shown
from remask.errors import ConfigError
from remask.request.schema_parts import BOUNDS, FORMATS, number_expression, string_expression

MAX_EXPRESSION_CHARS = 2**18
"""Characters of the expression of a schema."""
MAX_DEPTH = 32
MAX_REFERENCES = 64
MAX_VISITS = 2**12
"""Visits to schemas while one is translated, counted again for each reference, and other work in proportion."""
MAX_RECURSION = 4
"""How often a reference is followed within its own target."""
_VALUES_PER_VISIT = 16
"""Keywords of a schema, or values of an enum, whose work is about that of one visit."""

WORKS: Mapping[str, str] = {
    "$anchor": "a name that `$ref` may refer to",
    "$defs": "schemas that `$ref` may refer to",
    "$ref": "`#`, a JSON pointer (`#/$defs/name`) or an anchor (`#name`) of the same schema; one that leads back to "
    f"itself is followed {MAX_RECURSION} times",
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
    "strict": (False, True),  # OpenAI's, if it has slipped into the schema
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "uniqueItems": (False,),
}
"""Values with which a keyword restricts nothing."""

_EXCLUSIVE_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")  # allowed beside no other keyword
_DEFINITIONS = frozenset(["$defs", "definitions"])
_TYPES = frozenset(["array", "boolean", "integer", "null", "number", "object", "string"])
_KEYWORD_TYPES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(BOUNDS, frozenset(["integer", "number"])),
    **dict.fromkeys(("format", "maxLength", "minLength", "pattern"), frozenset(["string"])),
    **dict.fromkeys(("items", "maxItems", "minItems", "prefixItems"), frozenset(["array"])),
    **dict.fromkeys(
        ("additionalProperties", "maxProperties", "minProperties", "properties", "propertyNames", "required"),
        frozenset(["object"]),
    ),
}
"""The types that a keyword restricts."""

_STRING_CHARACTER = r'([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
_STRING = f'"{_STRING_CHARACTER}*"'
_INTEGER = r"-?(0|[1-9][0-9]*)"
_NUMBER = rf"{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_SCALAR = rf"({_STRING}|{_NUMBER}|true|false|null)"
_PERCENT = re.compile("(%[0-9A-Fa-f]{2})+")
_METACHARACTERS = frozenset(r"\.+*?()|[]{}^$#&-~/")
_ENTRY = f"{_STRING}: ?"
_LIST = rf"\[({_SCALAR}(, ?{_SCALAR})*)?\]"
_OBJECT = rf"\{{({_ENTRY}{_SCALAR}(, ?{_ENTRY}{_SCALAR})*)?\}}"
_VALUE = f"({_SCALAR}|{_LIST}|{_OBJECT})"


def escape(text: str) -> str:
    """Return the expression that matches `text` alone."""
    return "".join(f"\\{char}" if char in _METACHARACTERS else char for char in text)


def expression_of(schema: Mapping[str, Any], path: str) -> str:
    """Return the expression of a schema made of JSON values. `path` names it in errors.

    Raises `ConfigError`, which names the place in the schema, if it cannot be guaranteed or allows nothing.
    """
    return _Translation([id(schema)]).expression(schema, _Scope(path, schema, path, followed=frozenset([id(schema)])))


class _EmptyError(ConfigError):
    """A schema allows no value. The schema around it may still allow values without it."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """What a schema inherits from the schemas around it.

    Attributes:
        path: its name in errors.
        root, root_path: the schema that its references are relative to.
        types: types that the schemas around it allow.
        required_names: properties that must be written.
        followed: identities of the targets of references that led here and describe the same value.
        depth: how many schemas it is nested in.
    """

    path: str
    root: Any
    root_path: str
    types: frozenset[str] = _TYPES
    required_names: frozenset[str] = frozenset()
    followed: frozenset[int] = frozenset()
    depth: int = 0

    def child(self, name: str, key: str | int | None = None) -> "_Scope":
        """The scope of a subschema that describes a part of the value."""
        scope = self.branch(name, key)
        return replace(scope, types=_TYPES, required_names=frozenset(), followed=frozenset())

    def branch(self, name: str, key: str | int | None = None) -> "_Scope":
        """The scope of a subschema that describes the same value."""
        path = f"{self.path}.{name}"
        if key is not None:
            path += f"[{key}]" if isinstance(key, int) else f".{_short_name(key)}"
        return replace(self, path=path, depth=self.depth + 1)

    def with_required(self, names: frozenset[str]) -> "_Scope":
        """This scope with values restricted to objects that have properties of these names."""
        if not names:
            return self
        return replace(self, required_names=self.required_names | names, types=self.types & {"object"})


class _Property(NamedTuple):
    """The expression of a property's name and value, and whether it must be written."""

    expression: str
    is_required: bool


@dataclass(slots=True)
class _Translation:
    """Translates one schema. Raises `ConfigError` once that takes too much work or too long an expression."""

    _open_references: list[int]  # identities of the targets of the references that are being followed, outermost first
    _visits: int = 0
    _leaves: int = 0  # characters of the expressions of scalars
    # By the identity of the root schema.
    _targets: dict[tuple[int, str], tuple[Any, str]] = field(default_factory=dict)
    _anchors: dict[int, dict[str, Any]] = field(default_factory=dict)

    def expression(self, node: Any, scope: _Scope) -> str:
        """Return the expression of the schema `node`. Raises `_EmptyError` if it allows nothing."""
        node = self._read_keywords(node, scope)
        scope = _enter_root(node, scope)
        types = _allowed_types(node, scope.path)
        scope = replace(scope, types=types & scope.types)
        exclusive = next((name for name in _EXCLUSIVE_KEYWORDS if name in node), None)
        if exclusive is None:
            result = self._types_expression(node, scope)
        else:
            allowed = _DEFINITIONS | {"$anchor", "type"}
            names = [name for name in node if _restricts(node, name) and name not in allowed]
            if len(names) > 1 and set(names) != {"enum", "const"}:
                raise ConfigError(f"{scope.path} holds {' and '.join(sorted(names))}; only one can be guaranteed")
            result = self._exclusive_keyword(exclusive, node, scope)
        if len(result) > MAX_EXPRESSION_CHARS:
            raise _too_long_error(scope.root_path)
        return result

    def _read_keywords(self, node: Any, scope: _Scope) -> Mapping[str, Any]:
        """Return the keywords of `node`. Raises `ConfigError` on keywords that no expression would follow."""
        self._visit(scope, 1 + (len(node) // _VALUES_PER_VISIT if isinstance(node, Mapping) else 0))
        if scope.depth > MAX_DEPTH:
            raise ConfigError(f"{scope.root_path}: schemas are nested in more than {MAX_DEPTH} others")
        if node is False:
            raise _EmptyError(f"{scope.path} is false, which allows no value")
        if node is True:
            return {}
        if not isinstance(node, Mapping):
            raise ConfigError(f"{scope.path} must be an object of keywords, true or false, got {shown(node)}")
        for name in node:
            if name in WORKS or name in ANNOTATIONS or name.startswith("x-") or not _restricts(node, name):
                continue
            raise ConfigError(
                f"{scope.path} holds {_short_name(name)!r}, which cannot be guaranteed"
                + (f", as {REFUSED[name]}" if name in REFUSED else "; leave it out and check it yourself")
                + f". Understood: {', '.join(WORKS)}"
            )
        return node

    def _visit(self, scope: _Scope, count: int = 1) -> None:
        self._visits += count
        if self._visits > MAX_VISITS:
            raise _too_long_error(scope.root_path)

    def _count_leaf(self, text: str, scope: _Scope) -> str:
        """Return `text`, a scalar's expression. Raises `ConfigError` once all of them together are too long."""
        self._leaves += len(text)
        if self._leaves > 2 * MAX_EXPRESSION_CHARS:
            raise _too_long_error(scope.root_path)
        return text

    def _exclusive_keyword(self, name: str, node: Mapping[str, Any], scope: _Scope) -> str:
        """Return the expression of `name`, one of `_EXCLUSIVE_KEYWORDS`. Raises `_EmptyError` if it allows nothing."""
        if name == "$ref":
            return self._follow_reference(node["$ref"], scope)
        if name in ("const", "enum"):
            return self._count_leaf(_enum_expression(node, scope), scope)
        schemas = _schema_list(node, name, scope.path)
        branches = [(scope.branch(name, index), schema) for index, schema in enumerate(schemas)]
        if name == "oneOf":
            required = self._distinguishing_properties(branches, scope)
            branches = [
                (branch_scope.with_required(names), schema)
                for (branch_scope, schema), names in zip(branches, required, strict=True)
            ]
        elif name == "allOf":
            branches = [_only_restricting(branches, scope)]
        return _alternation(partial(self.expression, schema, branch_scope) for branch_scope, schema in branches)

    def _follow_reference(self, ref: object, scope: _Scope) -> str:
        """Return the expression of a reference's target. Raises `_EmptyError` at the limit of recursion."""
        target, target_scope = self._reference_target(ref, scope)
        if id(target) in scope.followed:
            raise ConfigError(
                f"{scope.path}: $ref {shown(ref)} refers to itself before any property or item, so that nothing could "
                "be checked by it; put it into one, or say what is meant"
            )
        target_scope = replace(target_scope, followed=scope.followed | {id(target)})
        if self._open_references.count(id(target)) >= MAX_RECURSION:
            raise _EmptyError(
                f"{scope.path}: $ref {shown(ref)} leads back to itself without a way out, so that no answer could "
                "end; leave a property on the way out of required, or allow null"
            )
        if len(self._open_references) >= MAX_REFERENCES:
            raise ConfigError(f"{scope.path}: $ref {shown(ref)} is within more than {MAX_REFERENCES} other references")
        self._open_references.append(id(target))
        try:
            return self.expression(target, target_scope)
        finally:
            self._open_references.pop()

    def _reference_target(self, ref: object, scope: _Scope) -> tuple[Any, _Scope]:
        """Return the target of a reference and its scope. Raises `ConfigError` if there is none."""
        if not isinstance(ref, str):
            raise ConfigError(f"{scope.path}: $ref must be a text such as '#/$defs/name', got {shown(ref)}")
        key = id(scope.root), ref
        if key not in self._targets:
            self._targets[key] = self._resolve_reference(ref, scope)
        target, path = self._targets[key]
        return target, replace(scope, path=path)

    def _resolve_reference(self, ref: str, scope: _Scope) -> tuple[Any, str]:
        """Return the target of a reference, and its path in errors. Raises `ConfigError` if there is none."""
        document, _, fragment = ref.partition("#")
        if document and document != str(scope.root.get("$id", "")).rstrip("#"):
            raise ConfigError(
                f"{scope.path}: $ref {shown(ref)} refers to another schema, and no other is looked up; put it into "
                "$defs, and refer to it as '#/$defs/name'"
            )
        fragment = _PERCENT.sub(
            lambda match: bytes.fromhex(match[0].replace("%", "")).decode(errors="replace"), fragment
        )
        if not fragment or fragment.startswith("/"):
            return _pointer_target(fragment, ref, scope)
        if id(scope.root) not in self._anchors:
            self._anchors[id(scope.root)] = dict(_anchors(scope.root))
        anchors = self._anchors[id(scope.root)]
        if fragment not in anchors:
            raise _missing_target_error(ref, scope, "there is no such $anchor", anchors)
        return anchors[fragment], f"{scope.root_path}#{_short_name(fragment)}"

    def _types_expression(self, node: Mapping[str, Any], scope: _Scope) -> str:
        """Return the expression of all types that `node` and the schemas around it allow."""
        translators: Mapping[str, Callable[[], str]] = {
            "string": lambda: self._count_leaf(_string_expression(node, scope), scope),
            "number": lambda: self._count_leaf(
                _number_expression(node, scope, whole="number" not in scope.types), scope
            ),
            "boolean": lambda: "(true|false)",
            "null": lambda: "null",
            "array": lambda: self._array_expression(node, scope),
            "object": lambda: self._object_expression(node, scope),
        }
        types = {"number" if name == "integer" else name for name in scope.types}
        if not types:
            raise _EmptyError(f"{scope.path} allows no type that what stands around it allows")
        return _alternation(translate for name, translate in translators.items() if name in types)

    def _array_expression(self, node: Mapping[str, Any], scope: _Scope) -> str:
        """Return the expression of a list. Raises `_EmptyError` if it needs an item whose schema allows nothing."""
        prefix = _schema_list(node, "prefixItems", scope.path) if "prefixItems" in node else []
        if isinstance(node.get("items"), list):
            raise ConfigError(f"{scope.path}.items must be one schema; a list of them is prefixItems")
        low, high = _size_limits(node, "Items", scope.path)
        items: list[str] = []
        further_item: str | None = None
        try:
            for index, schema in enumerate(prefix[:high]):
                items.append(self.expression(schema, scope.child("prefixItems", index)))
            if high is None or high > len(items):
                if "items" in node:
                    further_item = self.expression(node["items"], scope.child("items"))
                elif not prefix or low > len(prefix):
                    further_item = _VALUE if scope.depth == 0 and "object" not in scope.types else _SCALAR
        except _EmptyError as error:  # the list must end before that item
            if low > len(items):
                raise _EmptyError(f"{scope.path}: a list has {low} items at least, but {error}") from error
        if "minItems" not in node:
            low = len(items)
        return _items_expression(items, further_item, low, high)

    def _object_expression(self, node: Mapping[str, Any], scope: _Scope) -> str:
        """Return the expression of an object, without optional properties whose schemas allow nothing.

        Raises `_EmptyError` if a required property allows nothing, or if the limits allow no number of the properties.
        Raises `ConfigError` if the limits allow some numbers of them only: they do not say which properties.
        """
        properties, required = _property_schemas(node, scope.path)
        required_names = scope.required_names.union(required)
        low, high = _size_limits(node, "Properties", scope.path)
        if "properties" not in node or (not properties and isinstance(node.get("additionalProperties"), Mapping)):
            return self._map_expression(node, low, high, scope)
        if "propertyNames" in node and properties:
            raise ConfigError(
                f"{scope.path}: properties and propertyNames are not guaranteed together; keep one of them"
            )
        entries: list[_Property] = []
        for name, schema in properties.items():
            is_required = name in required_names
            try:
                value = self.expression(schema, scope.child("properties", name))
            except _EmptyError:
                if is_required:
                    raise
                continue
            entries.append(_Property(f" ?{_literal(name)} ?: ?{value}", is_required))
        least = sum(entry.is_required for entry in entries)
        if low > len(entries) or (high is not None and high < least):
            raise _EmptyError(
                f"{scope.path}: minProperties and maxProperties allow no object of {least} to {len(entries)} "
                "properties, as many as required and properties leave; leave them out"
            )
        if low > least or (high is not None and high < len(entries)):
            raise ConfigError(
                f"{scope.path}: minProperties and maxProperties are guaranteed where required and properties say as "
                "much; leave them out, or say which properties are meant"
            )
        return rf"\{{{_join_properties(entries)} ?\}}" if entries else r"\{\}"

    def _map_expression(self, node: Mapping[str, Any], low: int, high: int | None, scope: _Scope) -> str:
        """Return the expression of objects of any names. Raises `ConfigError` if they need two properties or more."""
        if low > 1:  # a JSON text may repeat a name
            raise ConfigError(
                f"{scope.path}: minProperties={low} of any names cannot be guaranteed, as two of them might be one; "
                "list them in properties, or ask for 1"
            )
        additional = node.get("additionalProperties", True)
        try:
            name_expression = _STRING
            if "propertyNames" in node:
                name_scope = replace(scope.child("propertyNames"), types=frozenset(["string"]))
                name_expression = self.expression(node["propertyNames"], name_scope)
            if _is_unrestricted(additional):
                value = _VALUE if scope.depth == 0 else _SCALAR
            else:
                value = self.expression(additional, scope.child("additionalProperties"))
        except _EmptyError:
            if low:
                raise
            high = 0
        if high == 0:
            return r"\{\}"
        entry = f"({name_expression}): ?({value})"
        max_further = "" if high is None else high - 1
        return rf"\{{({entry}(, ?{entry}){{0,{max_further}}}){'' if low else '?'}\}}"

    def _distinguishing_properties(self, branches: Sequence[tuple[_Scope, Any]], scope: _Scope) -> list[frozenset[str]]:
        """Return, for each branch of a `oneOf`, the properties whose values exclude the other branches.

        Raises `ConfigError` if two branches might fit one value.
        """
        tags = [self._tags(schema, branch_scope, 0) for branch_scope, schema in branches]
        for name in tags[0]:  # usually one property distinguishes all branches
            values = [branch_tags[name] for branch_tags in tags if name in branch_tags]
            if len(values) == len(tags) and len(frozenset().union(*values)) == sum(map(len, values)):
                return [frozenset([name]) if name else frozenset()] * len(tags)
        properties: list[set[str]] = [set() for _ in branches]
        for first, second in combinations(range(len(branches)), 2):
            self._visit(scope)
            disjoint = [
                name for name in tags[first] if name in tags[second] and not tags[first][name] & tags[second][name]
            ]
            if not disjoint:
                raise ConfigError(
                    f"{scope.path} holds 'oneOf', whose branches {first} and {second} might both fit, as no const or "
                    "enum of one property excludes the other; give each a property of its own const, or use anyOf"
                )
            if "" not in disjoint:
                properties[first].add(disjoint[0])
                properties[second].add(disjoint[0])
        return [frozenset(names) for names in properties]

    def _tags(self, node: Any, scope: _Scope, depth: int) -> dict[str, frozenset[str]]:
        """Return, by property, all values that the schema `node` allows it; "" stands for the value itself.

        Properties whose values are not limited by a `const` or `enum` are left out.
        """
        self._visit(scope)
        if depth > MAX_RECURSION or not isinstance(node, Mapping):
            return {}
        scope = _enter_root(node, scope)
        if "$ref" in node:
            return self._tags(*self._reference_target(node["$ref"], scope), depth + 1)
        if "const" in node or isinstance(node.get("enum"), list):
            values = [node["const"]] if "const" in node else node["enum"]
            self._visit(scope, count_values(values, MAX_VISITS * _VALUES_PER_VISIT) // _VALUES_PER_VISIT)
            return {"": frozenset(map(_canonical_text, values))}
        for keyword in ("allOf", "anyOf", "oneOf"):
            schemas = node.get(keyword)
            branches = schemas if isinstance(schemas, list) else []
            if keyword == "allOf":
                branches = [branch for branch in branches if not _is_unrestricted(branch)]
            if branches:
                branch_tags = [self._tags(branch, scope, depth + 1) for branch in branches]
                common = set.intersection(*map(set, branch_tags))
                return {name: frozenset().union(*(tags[name] for tags in branch_tags)) for name in sorted(common)}
        properties = node.get("properties")
        result = {}
        for name, schema in properties.items() if isinstance(properties, Mapping) else ():
            tags = self._tags(schema, scope, depth + 1)
            if name and "" in tags:
                result[name] = tags[""]
        return result


def _alternation(translations: Iterable[Callable[[], str]]) -> str:
    """Return the alternation of the expressions that `translations` return, without those that raise `_EmptyError`.

    Raises the first of these errors if there is no expression.
    """
    expressions: list[str] = []
    errors: list[_EmptyError] = []
    for translate in translations:
        try:
            expressions.append(translate())
        except _EmptyError as error:
            errors.append(error)
    if not expressions:
        raise errors[0]
    return expressions[0] if len(expressions) == 1 else f"({'|'.join(dict.fromkeys(expressions))})"


def _restricts(node: Mapping[str, Any], name: str) -> bool:
    """Whether a keyword of `node` restricts anything: it is no annotation, and its value is not neutral."""
    if name in ANNOTATIONS or name.startswith("x-"):
        return False
    value = node[name]
    return not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(name, ()))


def _is_unrestricted(node: Any) -> bool:
    return node is True or (isinstance(node, Mapping) and not any(_restricts(node, name) for name in node))


def _only_restricting(branches: Sequence[tuple[_Scope, Any]], scope: _Scope) -> tuple[_Scope, Any]:
    """Return the branch of an `allOf` that restricts anything, or else the first. Raises `ConfigError` on several."""
    restricting = [branch for branch in branches if not _is_unrestricted(branch[1])]
    if len(restricting) > 1:
        raise ConfigError(
            f"{scope.path} holds 'allOf' of {len(restricting)} schemas, which cannot be guaranteed, as an "
            "answer of two schemas at once is none of either's expression; write one schema"
        )
    return (restricting or branches)[0]


def _enter_root(node: Mapping[str, Any], scope: _Scope) -> _Scope:
    """Return `scope` with `node` as its root if the node has an `$id`, as references within are relative to that."""
    schema_id = node.get("$id")
    if node is scope.root or not isinstance(schema_id, str) or schema_id.startswith("#"):
        return scope
    return replace(scope, root=node, root_path=scope.path)


def _allowed_types(node: Mapping[str, Any], path: str) -> frozenset[str]:
    """Return the types that a schema allows: those of `type`, or else those that its keywords apply to."""
    keyword_types = {name: _KEYWORD_TYPES[name] for name in node if name in _KEYWORD_TYPES and _restricts(node, name)}
    if "type" not in node:
        return frozenset().union(*keyword_types.values()) if keyword_types else _TYPES
    value = node["type"]
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        raise ConfigError(f"{path}.type must be one or some of {', '.join(sorted(_TYPES))}, got {shown(value)}")
    types = frozenset(names) | ({"integer"} if "number" in names else set())
    for name, allowed in keyword_types.items():
        if not types & allowed and name != "additionalProperties":
            raise ConfigError(f"{path}: {name} needs the type {' or '.join(map(repr, sorted(allowed)))}, got {value!r}")
    return types


def _enum_expression(node: Mapping[str, Any], scope: _Scope) -> str:
    """Return the expression of the values of `enum` and `const`. Raises `_EmptyError` if none has an allowed type."""
    values = node.get("enum", [node.get("const")])
    if not isinstance(values, list):
        raise ConfigError(f"{scope.path}.enum must be a list of values, got {shown(values)}")
    if "const" in node:
        const = _canonical_text(node["const"])
        values = [value for value in values if _canonical_text(value) == const]
    if not values:
        raise ConfigError(f"{scope.path}: enum holds no value that is allowed; list one at least")
    if "type" in node:
        types = _allowed_types(node, scope.path)
        mistyped = [value for value in values if not _has_type(value, types)]
        if mistyped:
            raise ConfigError(
                f"{scope.path} holds a value that is not of its own type {node['type']!r}: {shown(mistyped[0])}"
            )
    values = [value for value in values if _has_type(value, scope.types)]
    if not values:
        raise _EmptyError(f"{scope.path}: no value is of a type that what stands around it allows")
    return f"({'|'.join(dict.fromkeys(map(_literal, values)))})"


def _has_type(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        names = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}
        return names[type(value)] in types
    return "number" in types or ("integer" in types and (isinstance(value, int) or value.is_integer()))


def _canonical_text(value: Any) -> str:
    """Return a text that is the same for all values that are equal in JSON Schema, such as 1 and 1.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical_text, value))}]"
    if isinstance(value, Mapping):
        members = [f"{json.dumps(name)}:{_canonical_text(value[name])}" for name in sorted(value)]
        return f"{{{','.join(members)}}}"
    return json.dumps(value)


def _literal(value: Any) -> str:
    """Return the expression of one JSON value, with an optional space after commas, colons and brackets."""
    if isinstance(value, list) and value:
        content = r" ?, ?".join(map(_literal, value))
        return rf"\[ ?{content} ?\]"
    if isinstance(value, Mapping) and value:
        content = r" ?, ?".join(f"{_literal(name)} ?: ?{_literal(item)}" for name, item in value.items())
        return rf"\{{ ?{content} ?\}}"
    text = json.dumps(value, ensure_ascii=False)
    # Surrogates have no UTF-8 bytes, and characters that are not printable are safer as escapes.
    return escape(re.sub(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text))


def _items_expression(items: Sequence[str], further_item: str | None, low: int, high: int | None) -> str:
    """Return the expression of a list of `low` to `high` items: those of `items`, and then `further_item` if any."""
    text = ""
    if further_item is not None and high != 0:
        items = items or [further_item]
        max_further = "" if high is None else high - len(items)
        text = rf"(, ?({further_item})){{{max(low - len(items), 0)},{max_further}}}"
    for index, item in reversed(list(enumerate(items))):
        text = f"{', ?' if index else ''}({item}){text}"
        text = text if index < low else f"({text})?"
    return rf"\[ ?{text} ?\]"


def _property_schemas(node: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any], list[str]]:
    """Return the schemas of properties, and the required names. Raises `ConfigError` if one of these has no schema."""
    properties = node.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ConfigError(f"{path}.properties must be an object of schemas, got {shown(properties)}")
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ConfigError(f"{path}.required must be a list of names of properties, got {shown(required)}")
    missing = [name for name in required if name not in properties]
    if missing:
        raise ConfigError(f"{path} needs a schema for each property, such as {_short_name(missing[0])!r}")
    return properties, required


def _join_properties(entries: Sequence[_Property]) -> str:
    """Join the expressions of properties by commas."""
    first = next((index for index, entry in enumerate(entries) if entry.is_required), None)
    if first is None:
        return f"({_nonempty_subset([entry.expression for entry in entries])})?" if entries else ""
    head = "".join(f"({entry.expression} ?,)?" for entry in entries[:first])
    tail = "".join(
        f" ?,{entry.expression}" if entry.is_required else f"( ?,{entry.expression})?" for entry in entries[first + 1 :]
    )
    return head + entries[first].expression + tail


def _nonempty_subset(texts: Sequence[str]) -> str:
    """Return the expression of one or more of `texts`, in order, with commas between them."""
    if len(texts) == 1:
        return texts[0]
    half = len(texts) // 2
    optional_half = "".join(f"( ?,{text})?" for text in texts[half:])
    return f"(({_nonempty_subset(texts[:half])}){optional_half}|{_nonempty_subset(texts[half:])})"


def _string_expression(node: Mapping[str, Any], scope: _Scope) -> str:
    """Return the expression of strings. Raises `ConfigError` on keywords that cannot be guaranteed together."""
    try:
        pattern = string_expression(node)
    except ConfigError as error:
        raise ConfigError(f"{scope.path}: {error}") from error
    low, high = _size_limits(node, "Length", scope.path)
    if pattern is not None:
        return pattern
    if low == 0 and high is None:
        return _STRING
    return f'"{_STRING_CHARACTER}{{{low},{"" if high is None else high}}}"'


def _number_expression(node: Mapping[str, Any], scope: _Scope, *, whole: bool) -> str:
    if not any(name in node for name in BOUNDS):
        return _INTEGER if whole else _NUMBER
    try:
        result = number_expression(node, whole=whole)
    except ConfigError as error:
        raise ConfigError(f"{scope.path}: {error}") from error
    if result is None:
        raise ConfigError(f"{scope.path}: {' and '.join(name for name in BOUNDS if name in node)} leave no number")
    return result


def _size_limits(node: Mapping[str, Any], noun: str, path: str) -> tuple[int, int | None]:
    """Return the values of `min` and `max` of a noun, 0 and None if not set. Raises `ConfigError` on bad ones."""
    limits: list[int | None] = []
    for name in (f"min{noun}", f"max{noun}"):
        value = node.get(name)
        is_size = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)
        if value is not None and not is_size:
            raise ConfigError(f"{path}.{name} must be a whole number from 0, got {shown(value)}")
        limits.append(None if value is None else int(value))
    low, high = limits[0] or 0, limits[1]
    if high is not None and low > high:
        raise ConfigError(f"{path}: min{noun}={low} and max{noun}={high} leave no value")
    return low, high


def _schema_list(node: Mapping[str, Any], name: str, path: str) -> list[Any]:
    schemas = node[name]
    if not isinstance(schemas, list) or not (schemas or name == "prefixItems"):
        raise ConfigError(f"{path} holds {name!r}, which must be a list of one schema at least, got {shown(schemas)}")
    return schemas


def _pointer_target(pointer: str, ref: str, scope: _Scope) -> tuple[Any, str]:
    """Return what the JSON pointer of `ref` leads to, and its path in errors. Raises `ConfigError` if to nothing."""
    target, path = scope.root, scope.root_path
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        members: Mapping[str, Any] = {}
        if isinstance(target, list):
            members = {str(index): item for index, item in enumerate(target)}
        elif isinstance(target, Mapping):
            members = target
        if key not in members:
            raise _missing_target_error(ref, scope, f"{path} has no {_short_name(key)!r}", members)
        path = f"{path}[{key}]" if isinstance(target, list) else f"{path}.{_short_name(key)}"
        target = members[key]
    return target, path


def _anchors(root: Any) -> Iterable[tuple[str, Any]]:
    """Yield the name and the schema of every anchor of `root`; subschemas with an `$id` have anchors of their own."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, Mapping) and (node is root or not isinstance(node.get("$id"), str)):
            if isinstance(node.get("$anchor"), str):
                yield node["$anchor"], node
            pending += [value for name, value in node.items() if name not in ("const", "default", "enum", "examples")]


def _missing_target_error(ref: str, scope: _Scope, reason: str, members: Iterable[str]) -> ConfigError:
    names = [repr(_short_name(member)) for member in members]
    listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return ConfigError(f"{scope.path}: $ref {shown(ref)} leads nowhere: {reason}; there is {listing or 'nothing'}")


def _short_name(text: str) -> str:
    """Return a name from a schema in a form that is short and printable, for errors."""
    short = text if len(text) <= 60 else f"{text[:60]}..."
    return short if short.isprintable() else ascii(short)


def _too_long_error(path: str) -> ConfigError:
    return ConfigError(
        f"{path} is too long: it comes to more than {MAX_EXPRESSION_CHARS} characters of a regular expression, or to "
        f"more than {MAX_VISITS} schemas; ask for fewer or simpler values"
    )
