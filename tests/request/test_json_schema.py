"""Schemas as expressions: whatever text an expression lets through parses and is valid, as judged by `jsonschema`."""

import json
import random
import re
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema_specifications import REGISTRY

from remask.answers.structured_worker import CompilerSettings, compile_pattern
from remask.errors import ConfigError
from remask.machine.helper import RefusedError
from remask.request.forms import StructuredOutputs
from remask.request.json_schema import ANNOTATIONS, REFUSED, WORKS
from remask.request.schema_parts import FORMATS

pytest.importorskip("outlines_core", reason="needs outlines-core: pip install 'remask[server]'")
SETTINGS: CompilerSettings = {
    "tokens": [(byte, bytes([byte])) for byte in range(256)],
    "vocab_size": 256,
    "max_transitions": 2**20,
}


class Language:
    """The texts that the expression of a schema lets through, byte by byte."""

    def __init__(self, schema: dict[str, Any]) -> None:
        form = StructuredOutputs(json=schema)
        made = compile_pattern(form.source.expression, SETTINGS)
        self.start, self.final = made["start"], set(made["final"])
        self.leads: dict[int, dict[int, int]] = defaultdict(dict)
        before = defaultdict(set)
        columns = [array("q", column) for column in (made["source"], made["label"], made["target"])]
        for state, byte, target in zip(*columns, strict=True):
            self.leads[state][byte] = target
            before[target].add(state)
        self.left = dict.fromkeys(self.final, 0)  # bytes to the end, at least
        held = deque(self.final)
        while held:
            target = held.popleft()
            for state in before[target] - self.left.keys():
                self.left[state] = self.left[target] + 1
                held.append(state)

    def __contains__(self, text: str) -> bool:
        state: int | None = self.start
        for byte in text.encode():
            state = None if state is None else self.leads.get(state, {}).get(byte)
        return state in self.final

    def drawn(self, rng: random.Random) -> str:
        """A text of about so many bytes; every state that may follow is as likely as the others."""
        state, text, most = self.start, bytearray(), rng.choice([0, 20, 100, 300])
        while True:
            by_target = defaultdict(list)
            for byte, target in self.leads.get(state, {}).items():
                if target in self.left:
                    by_target[target].append(byte)
            if state in self.final and (not by_target or len(text) >= most or rng.random() < 0.3):
                return text.decode()
            nearest = min(by_target, key=lambda target: self.left[target])
            target = nearest if len(text) >= most else rng.choice(list(by_target))
            text.append(rng.choice(by_target[target]))
            state = target


def holds(schema: dict[str, Any], texts: int = 30, seed: int = 0) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    language, rng = Language(schema), random.Random(seed)
    for text in {language.drawn(rng) for _ in range(texts)}:
        validator.validate(json.loads(text))


def model(tag: Any, required: bool = True, **properties: Any) -> dict[str, Any]:
    own = {"kind": {"const": tag}, **properties}
    return {"type": "object", "properties": own, **({"required": ["kind"]} if required else {})}


NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}},
    "required": ["value", "next"],
}
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2, "maxItems": 2}
UNION = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
    "$defs": {
        "Cat": model("cat", required=False, lives={"type": "integer"}),
        "Dog": {"oneOf": [model("dog", sex={"const": "m"}), model("dog", sex={"enum": ["f", None]})]},
    },
}
# A schema, a text that it must let through, and one that it must not.
RIGHT: list[tuple[dict[str, Any], str, str]] = [
    ({"properties": {'a"b': {"const": 1}}, "required": ['a"b']}, r'{"a\"b": 1}', '{"a"b": 1}'),
    ({"properties": {"a\\n": {"const": 1}}, "required": ["a\\n"]}, r'{"a\\n": 1}', r'{"a\n": 1}'),
    ({"properties": {"\n\0\x7f": {"const": 1}}, "required": ["\n\0\x7f"]}, r'{"\n\u0000\u007f": 1}', '{"\n\0": 1}'),
    ({"properties": {"\ud800é.*": {}}, "required": ["\ud800é.*"]}, r'{"\ud800é.*": 1}', '{"é.*": 1}'),
    ({"enum": [{'q"': ["\\", {"\t": "\x1b"}]}]}, r'{"q\"": ["\\", {"\t": "\u001b"}]}', '{"q"": []}'),
    ({"const": {"a": {"b\\": '"'}}}, r'{"a": {"b\\": "\""}}', r'{"a": {"b\": "\""}}'),
    (PAIR, "[1, true]", "[1]"),
    ({"type": "array", "prefixItems": [PAIR, PAIR], "items": False}, "[[1, true], [0, false]]", "[[1, true], [0]]"),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False, "minItems": 0}, "[]", "[null, null]"),
    ({"prefixItems": [{"type": "null"}], "items": {"const": 1}, "maxItems": 3}, "[null, 1, 1]", "[null, 1, 1, 1]"),
    ({"prefixItems": [{"type": "null"}], "minItems": 2, "maxItems": 2}, '[null, "x"]', "[null]"),
    ({"prefixItems": [{"type": "null"}, False, {"const": 3}]}, "[null]", "[null, 3]"),
    ({"type": "array", "items": False}, "[]", "[1]"),
    ({"type": "array", "items": {"const": 1}, "minItems": 2}, "[1, 1, 1]", "[1]"),
    ({}, '{"a": [1, "x"]}', "{a}"),
    ({"type": "object"}, '{"a": {"b": 1}, "c": [true]}', "[]"),
    ({"type": "array"}, '[{"a": 1}, [2], 3]', "{}"),
    ({"type": "object", "properties": {"a": True, "b": False, "c": {"type": "object"}}}, '{"c": {"x": 1}}', '{"b": 1}'),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"x": 1, "y": 2}', '{"x": "1"}'),
    ({"type": "object", "additionalProperties": False}, "{}", '{"a": 1}'),
    ({"propertyNames": {"enum": ["x"]}, "minProperties": 1, "maxProperties": 2}, '{"x": 1, "x": 2}', "{}"),
    ({"type": ["integer", "null"], "minimum": 3}, "null", "2"),
    ({"type": ["string", "array"], "minLength": 2, "maxItems": 1}, '"ab"', '"a"'),
    ({"minimum": 5, "minLength": 2}, '"ab"', "true"),
    ({"type": "object", "anyOf": [model(1), {"type": "null"}]}, '{"kind": 1}', "null"),
    (UNION, '{"kind": "cat"}', "{}"),
    (UNION, '{"kind": "dog", "sex": "m"}', '{"kind": "dog"}'),
    ({"oneOf": [model(1), model(1.5), model(True), model(None)]}, '{"kind": 1.5}', '{"kind": 2}'),
    ({"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", "c"]}]}, '"c"', '"d"'),
    ({"oneOf": [{"type": "null"}]}, "null", "1"),
    ({"anyOf": [{"properties": {"a": False}, "minProperties": 1}, {"type": "null"}]}, "null", "{}"),
    ({"anyOf": [{"properties": {"a": {}}, "required": ["a"], "maxProperties": 0}, {"const": 1}]}, "1", '{"a": 1}'),
    ({"items": {"oneOf": UNION["oneOf"]}, "$defs": UNION["$defs"]}, '[{"kind": "cat"}]', "[{}]"),
    ({"allOf": [{"$ref": "#/$defs/A"}], "default": None, "$defs": {"A": {"type": "null"}}}, "null", "1"),
    ({"type": "integer", "allOf": [{"description": "no more"}, {"minimum": 3}, True]}, "3", "2.5"),
    ({"$ref": "#/$defs/A~1B%20C", "$defs": {"A/B C": {"const": 1}}}, "1", "2"),
    ({"$ref": "#/$defs/~01%25%22", "$defs": {'~1%"': {"const": 1}}}, "1", "2"),
    ({"prefixItems": [{"$ref": "#/items/anyOf/1"}], "items": {"anyOf": [{"const": 2}, {"const": 1}]}}, "[1]", "[2]"),
    ({"$ref": "#here", "$defs": {"x": {"type": "array", "items": {"$anchor": "here", "const": 1}}}}, "1", "2"),
    ({"$id": "https://x.org/a", "$ref": "https://x.org/a#/$defs/b", "$defs": {"b": {"const": 1}}}, "1", "2"),
    (
        {"$defs": {"a": {"const": 2}}, "items": {"$id": "b", "$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}},
        "[1]",
        "[2]",
    ),
    (
        {"$defs": {"N": NODE}, "$ref": "#/$defs/N"},
        '{"value": 1, "next": {"value": 2, "next": null}}',
        '{"value": 1}',
    ),
    (
        {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}, "required": ["kids"]},
        '{"kids": [{"kids": []}]}',
        "{}",
    ),
    ({"type": "object", "properties": {k: {"const": 1} for k in "abcde"}}, '{"b": 1, "e": 1}', '{"e": 1, "b": 1}'),
    ({"type": "object", "properties": {k: {"const": 1} for k in "abcde"}, "required": ["c"]}, '{"c": 1}', '{"a": 1}'),
    ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "3.5", "3.99999999999999999"),
    ({"type": "number", "exclusiveMinimum": -3, "maximum": 0}, "-2.999", "-2.99999999999999999"),
    ({"type": "number"}, "-1.5e+3", "1."),
    ({"type": "string", "maxLength": 2}, '"é€"', '"abc"'),
    ({"type": "string", "pattern": r"^[^\d]\D\W[\D]$"}, '"aa +"', '"٣a -"'),
    ({"x-order": 1, "example": 3, "externalDocs": {}, "xml": {}, "type": "null"}, "null", "1"),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), RIGHT)
def test_a_schema_lets_through_what_is_right(schema: dict[str, Any], right: str, wrong: str) -> None:
    language = Language(schema)
    assert right in language
    assert wrong not in language
    holds(schema)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"enum": []}, "json: enum holds no value"),
    ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "json.properties.a: enum holds no value"),
    ({"anyOf": [{"enum": []}, {"type": "null"}]}, "json.anyOf[0]: enum holds no value"),
    ({"properties": {"a": {"items": {"enum": []}}}}, "json.properties.a.items: enum holds no value"),
    ({"const": 1, "enum": [2]}, "enum holds no value that is allowed"),
    ({"enum": 3}, "json.enum must be a list"),
    ({"properties": {"a": {"type": ["integer", "null"], "minimum": 3, "maximum": 2}}}, "minimum and maximum leave no"),
    ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "minimum and maximum leave no number"),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "exclusiveMinimum and exclusiveMaximum leave"),
    ({"type": []}, "json.type must be one or some of array, boolean"),
    ({"type": "text"}, "got 'text'"),
    ({"items": {"type": 3}}, "json.items.type must be"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength=3 and maxLength=2 leave no value"),
    ({"items": {"minItems": 3, "maxItems": 2}, "minItems": 1}, "json.items: minItems=3 and maxItems=2 leave no value"),
    ({"minLength": -1}, "json.minLength must be a whole number from 0, got -1"),
    ({"minItems": True}, "json.minItems must be a whole number"),
    ({"minProperties": 2, "maxProperties": 1, "properties": {}}, "minProperties=2 and maxProperties=1"),
    (
        {"prefixItems": [{}], "items": False, "minItems": 2},
        "2 items at least, but structured_outputs.json.items is false",
    ),
    ({"properties": {"a": False}, "required": ["a"]}, "json.properties.a is false"),
    ({"required": "a"}, "json.required must be a list of names"),
    ({"type": "object", "minProperties": 2}, "minProperties=2 of any names"),
    ({"properties": {"a": {}}, "minProperties": 1}, "minProperties and maxProperties are guaranteed where"),
    (
        {"properties": {"a": False}, "minProperties": 1},
        "json: minProperties and maxProperties allow no object of 0",
    ),
    ({"properties": {"a": {}}, "required": ["a"], "maxProperties": 0}, "allow no object of 1 to 1 properties"),
    ({"properties": {"a": {}}, "propertyNames": {"maxLength": 1}}, "properties and propertyNames are not"),
    ({"items": [{"type": "null"}]}, "json.items must be one schema; a list of them is prefixItems"),
    ({"type": "null", "anyOf": [{"type": "string"}]}, "json.anyOf[0] allows no type"),
    ({"type": "null", "anyOf": [{"enum": ["a"]}]}, "no value is of a type"),
    ({"anyOf": []}, "must be a list of one schema at least"),
    ({"anyOf": {"type": "null"}}, "must be a list of one schema at least"),
    ({"allOf": [{"type": "null"}, {"minimum": 3}]}, "'allOf' of 2 schemas"),
    (
        {"$ref": "#/$defs/a", "additionalProperties": False, "$defs": {"a": {}}},
        "$ref and additionalProperties; only one can be",
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "branches 0 and 1 might both fit"),
    ({"oneOf": [model(1), model(2), model(1.0)]}, "branches 0 and 2 might both fit"),
    ({"oneOf": [model(1), {"properties": {"kind": {"type": "string"}}}]}, "branches 0 and 1 might both fit"),
    ({"$ref": "#/$defs/Cta", "$defs": {"Cat": {}, "Dog": {}}}, "json.$defs has no 'Cta'; there is 'Cat', 'Dog'"),
    ({"items": {"$ref": "#/$defs/a/b/c"}, "$defs": {"a": {"b": [1]}}}, "json.$defs.a.b has no 'c'; there is '0'"),
    (
        {"items": {"$ref": "#/$defs/a"}},
        "json.items: $ref '#/$defs/a' leads nowhere: structured_outputs.json has no '$defs'",
    ),
    ({"$ref": "#nome", "$defs": {"a": {"$anchor": "name"}}}, "there is no such $anchor; there is 'name'"),
    ({"$ref": "other.json"}, "refers to another schema"),
    ({"$ref": 3}, "$ref must be a text"),
    ({"$ref": "#"}, "json: $ref '#' refers to itself before any property or item"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "$defs.b: $ref '#/$defs/a'",
    ),
    ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "json.anyOf[1]: $ref '#' refers to itself"),
    (
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "json.properties.a: $ref '#' leads back to itself without",
    ),
    (
        {"$ref": "#/$defs/N", "$defs": {"N": {"items": {"$ref": "#/$defs/N"}, "minItems": 1}}},
        "json.$defs.N.items: $ref",
    ),
    ({"const": float("nan")}, "json is no JSON"),
    ({"properties": {'a"\n': {"not": {}}}}, "'a\"\\n' holds 'not', which cannot be guaranteed"),
    ({"properties": {"a": {"nope": 1}}}, "json.properties.a holds 'nope', which cannot be guaranteed; leave it out"),
    ({"type": "number", "maximum": 10**14}, "maximum has more than 14 digits"),
    ({"type": "integer", "minimum": 10**400}, "minimum has more than 18 digits"),
    ({"type": "number", "exclusiveMaximum": -(10**400)}, "exclusiveMaximum has more than 14 digits"),
]


@pytest.mark.parametrize(("schema", "error"), WRONG)
def test_what_is_wrong_is_refused_with_its_place(schema: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize("unrestricted", [{}, {"title": "any"}])
def test_an_empty_schema_of_further_properties_is_as_true(unrestricted: dict[str, Any]) -> None:
    def source(schema: object) -> object:
        further = {"type": "object", "additionalProperties": schema}
        schemas: list[dict[str, Any]] = [further, {"type": "array", "items": further}]
        return [StructuredOutputs(json=schema).source for schema in schemas]

    assert source(unrestricted) == source(True)


def keywords() -> Iterator[str]:
    """All keywords of draft 2020-12, as its schemas of schemas list them."""
    for uri in REGISTRY:
        if uri.startswith("https://json-schema.org/draft/2020-12/meta/"):
            yield from REGISTRY[uri].contents["properties"]


# For each keyword a schema of which it makes a difference.
EXAMPLES: dict[str, dict[str, Any]] = {
    "$anchor": {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "null"}}},
    "$defs": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
    "$dynamicAnchor": {"$dynamicAnchor": "a"},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$ref": {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "null"}}},
    "$vocabulary": {"$vocabulary": {"https://json-schema.org/draft/2020-12/vocab/core": True}},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "null"}},
    "allOf": {"allOf": [{"type": "null"}]},
    "anyOf": {"anyOf": [{"type": "null"}, {"const": 1}]},
    "const": {"const": [1]},
    "contains": {"type": "array", "contains": {"const": 1}},
    "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    "contentMediaType": {"type": "string", "contentMediaType": "application/json"},
    "contentSchema": {"type": "string", "contentSchema": {"type": "null"}},
    "definitions": {"$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"type": "null"}}},
    "else": {"else": {"type": "null"}},
    "enum": {"enum": [1, "a"]},
    "exclusiveMaximum": {"type": "integer", "exclusiveMaximum": 3},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 3},
    "format": {"type": "string", "format": "date"},
    "if": {"if": {"type": "null"}},
    "items": {"type": "array", "items": {"type": "null"}},
    "maxContains": {"type": "array", "maxContains": 1},
    "maxItems": {"type": "array", "maxItems": 2},
    "maxLength": {"type": "string", "maxLength": 2},
    "maxProperties": {"type": "object", "maxProperties": 1},
    "maximum": {"type": "number", "maximum": 3},
    "minContains": {"type": "array", "minContains": 1},
    "minItems": {"type": "array", "minItems": 2},
    "minLength": {"type": "string", "minLength": 2},
    "minProperties": {"type": "object", "minProperties": 1},
    "minimum": {"type": "number", "minimum": 3},
    "multipleOf": {"type": "integer", "multipleOf": 3},
    "not": {"not": {"type": "null"}},
    "oneOf": {"oneOf": [model(1), model(2)]},
    "pattern": {"type": "string", "pattern": "^a+$"},
    "patternProperties": {"patternProperties": {"^a": {"type": "null"}}},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}]},
    "properties": {"properties": {"a": {"type": "null"}}},
    "propertyNames": {"propertyNames": {"maxLength": 2}},
    "required": {"properties": {"a": {"type": "null"}}, "required": ["a"]},
    "then": {"then": {"type": "null"}},
    "type": {"type": "null"},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "uniqueItems": {"type": "array", "uniqueItems": True},
}


def test_the_tables_have_every_keyword_of_the_draft() -> None:
    tables = [*WORKS, *ANNOTATIONS, *REFUSED]
    assert len(tables) == len(set(tables))
    assert set(keywords()) <= set(tables)
    assert EXAMPLES.keys() == WORKS.keys() | REFUSED.keys()


@pytest.mark.parametrize("keyword", EXAMPLES)
def test_a_keyword_works_or_is_refused_as_its_table_says(keyword: str) -> None:
    schema = EXAMPLES[keyword]
    if keyword in REFUSED:
        nested = {"type": "object", "properties": {"deep": {"type": "array", "items": schema}}}
        error = rf"json\.properties\.deep\.items holds '{re.escape(keyword)}'.*{re.escape(REFUSED[keyword][:40])}"
        with pytest.raises(ConfigError, match=error):
            StructuredOutputs(json=nested)
    else:
        holds(schema)


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_an_annotation_changes_nothing(keyword: str) -> None:
    plain: dict[str, Any] = {"type": "integer", "minimum": 3}
    noted = StructuredOutputs(json={"$ref": "#/$defs/a", keyword: "x", "$defs": {"a": plain | {keyword: "x"}}})
    assert noted.source == StructuredOutputs(json=plain).source


NAMES = st.text(st.sampled_from('ab"\\\n\0\x1b\x7fé€\ud800\U0001f600/.*[ '), max_size=3)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.floats(allow_nan=False, allow_infinity=False), NAMES
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=4,
)
SIZES = st.integers(0, 3)
PATTERNS = (
    "^[a-c]{1,4}$",
    "b|^c$",
    '^("|x){2}$',
    r"^\d{2}[^a-z]$",
    r"^.\\\\\w?$",
    r"^[\s\S]{2}\u0041$",
    r"^\D\W\S$",
    ".",
)


def of(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    needed = {name.rstrip("_"): values for name, values in keywords.items() if not name.endswith("_")}
    return st.fixed_dictionaries(needed, optional={n.rstrip("_"): v for n, v in keywords.items() if n.endswith("_")})


def kinds(*names: str) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(names),
        st.lists(st.sampled_from([*names, "null", "boolean"]), min_size=1, max_size=2, unique=True),
    )


LEAVES = st.one_of(
    of(type=kinds("null", "boolean", "integer", "number", "string", "array", "object")),
    of(enum=st.lists(VALUES, max_size=3)),
    of(const=VALUES),
    of(type=kinds("integer", "number"), minimum_=st.integers(-30, 30), exclusiveMaximum_=st.integers(-30, 30)),
    of(type_=kinds("string"), minLength_=SIZES, maxLength_=SIZES),
    of(type=st.just("string"), pattern=st.sampled_from(PATTERNS)),
    of(type=st.just("string"), format=st.sampled_from(sorted(FORMATS))),
    of(**{"$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b~1~0%22", "#c"])}),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    either = st.one_of(inner, st.booleans())
    named = st.dictionaries(NAMES, either, min_size=1, max_size=3)
    tagged = st.tuples(st.one_of(st.integers(0, 2), NAMES), named).map(
        lambda pair: {"type": "object", "properties": {"k": {"const": pair[0]}, **pair[1]}}
    )
    objects = named.flatmap(
        lambda properties: of(
            type_=kinds("object"),
            properties=st.just(properties),
            required_=st.lists(st.sampled_from(sorted(properties)), unique=True),
            additionalProperties_=either,
        )
    )
    return st.one_of(
        objects,
        objects,
        of(type=kinds("object"), additionalProperties=either, propertyNames_=inner, maxProperties_=SIZES),
        of(type_=kinds("array"), items=either, minItems_=SIZES, maxItems_=SIZES),
        of(type_=kinds("array"), prefixItems=st.lists(either, min_size=1, max_size=3), items_=either, minItems_=SIZES),
        of(prefixItems=some, maxItems=SIZES, minItems_=SIZES),
        of(anyOf=some, type_=kinds("object", "array", "string")),
        of(allOf=some),
        of(oneOf=st.lists(tagged, min_size=1, max_size=3)),
        of(oneOf=st.lists(st.one_of(of(const=VALUES), tagged), min_size=2, max_size=3)),
    )


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=6)
WHOLE = st.builds(
    lambda schema, a, b, c: {**schema, "$defs": {"a": a, 'b/~"': b, "c": {**c, "$anchor": "c"}}},
    SCHEMAS,
    SCHEMAS,
    SCHEMAS,
    SCHEMAS,
)


def always_holds(schema: dict[str, Any], seed: int) -> None:
    """It is refused, or each of its texts is valid."""
    try:
        holds(schema, texts=20, seed=seed)
    except ConfigError as error:
        assume(not str(error).startswith("structured_outputs.json"))
        raise
    except RefusedError as error:
        assume("DFA" not in str(error) and "transitions" not in str(error))  # beyond the compiler's limits
        raise


@pytest.mark.thorough
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=WHOLE, seed=st.integers(0, 99))
def test_texts_of_some_schemas_are_valid(schema: dict[str, Any], seed: int) -> None:
    always_holds(schema, seed)


@pytest.mark.parametrize(
    "examples", [pytest.param(600, marks=pytest.mark.thorough), pytest.param(2000, marks=pytest.mark.soak)]
)
def test_texts_of_any_schema_are_valid(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(schema=WHOLE, seed=st.integers(0, 2**32))
    def hold(schema: dict[str, Any], seed: int) -> None:
        always_holds(schema, seed)

    hold()


def test_work_on_equal_values_is_no_product_of_their_sizes() -> None:
    """What takes seconds as a product takes hundredths of one as a sum."""
    start = time.process_time()
    with pytest.raises(ConfigError, match="enum holds no value"):
        StructuredOutputs(json={"const": [0] * 3000, "enum": [0] * 3000})
    branches = [{"$ref": "#/$defs/a"}] * 400
    with pytest.raises(ConfigError, match="json is too long"):
        StructuredOutputs(json={"oneOf": branches, "$defs": {"a": {"enum": [[0] * 8000]}}})
    assert time.process_time() - start < 2


def test_deep_values_are_refused_before_they_are_visited() -> None:
    deep: Any = 0
    for _ in range(700):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested more than 128 deep"):
        StructuredOutputs(json={"enum": [deep]})
