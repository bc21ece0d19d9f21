"""Bodies of which one value is as large as the OpenAPI document allows, alone or with all that it holds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
CHOICES = ("anyOf", "oneOf", "allOf")
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/decisions": {"state": "a", "questions": {"q": {"instructions": "a", "criteria": ["a", "b"]}}},
    "/v1/systemone": {"state": "a", "questions": {"q": {"instructions": "a", "criteria": ["a", "b"]}}},
    "/v1/score": {"queries": "a", "documents": ["a"]},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
"""A small body of each endpoint that takes one."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that a value may hold whatever its schema says: items of a list or an object, characters of a text."""

    items: int
    chars: int


def body_schemas(document: Schema) -> Iterator[tuple[str, Schema]]:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                yield path, content["schema"]


def forms(document: Schema, schema: Schema) -> Iterator[Schema]:
    """The schema itself, or each of its alternatives, without references."""
    if "$ref" in schema:
        yield from forms(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
        return
    chosen = [each for name in CHOICES for each in schema.get(name, ())]
    for each in chosen:
        yield from forms(document, each)
    if not chosen:
        yield schema


def unbounded(document: Schema, schema: Schema, path: str, above: frozenset[int] = frozenset()) -> Iterator[str]:
    """Where a value of `schema` may be as large as one likes."""
    for form in forms(document, schema):
        if id(form) in above:
            continue
        within = above | {id(form)}
        kind = form.get("type")
        if kind == "array":
            if "maxItems" not in form:
                yield f"{path}: array"
            yield from unbounded(document, form["items"], f"{path}[]", within) if "items" in form else ()
        elif kind == "object":
            for name, part in form.get("properties", {}).items():
                yield from unbounded(document, part, f"{path}.{name}", within)
            if form.get("additionalProperties", True) is not False and "maxProperties" not in form:
                yield f"{path}: object"
        elif kind == "string":
            if not {"maxLength", "enum", "const"} & form.keys():
                yield f"{path}: string"
        elif kind in ("integer", "number"):
            if not {"maximum", "exclusiveMaximum", "enum", "const"} & form.keys():
                yield f"{path}: {kind}"
        elif kind is None and not {"enum", "const"} & form.keys():
            yield f"{path}: anything"


def largest(document: Schema, form: Schema, bounds: Bounds, deep: int) -> Any:
    """A value of `form`, a schema without alternatives, as large as it may be; so are `deep` levels within it."""
    inner = bounds if deep else Bounds(1, 1)
    match form.get("type"):
        case "array":
            count = max(form.get("minItems", 0), min(form.get("maxItems", bounds.items), bounds.items))
            return [_first(document, form.get("items", {}), inner, deep)] * count
        case "object":
            named = form.get("properties", {})
            wanted = named if deep else {name: named[name] for name in form.get("required", ())}
            value = {name: _first(document, part, inner, deep) for name, part in wanted.items()}
            extra = form.get("additionalProperties", True)
            if extra is not False:
                count = min(form.get("maxProperties", bounds.items), bounds.items) - len(value)
                part = _first(document, extra, inner, deep) if isinstance(extra, Mapping) else 0
                value |= {f"k{number}": part for number in range(count)}
            return value
        case "string":
            if "enum" in form or "const" in form:
                return form.get("const", form.get("enum", [""])[0])
            return "a" * min(form.get("maxLength", bounds.chars), bounds.chars)
        case "integer" | "number" as kind:
            value = form.get("maximum", form.get("enum", [1])[0])
            return int(value) if kind == "integer" else value
        case "boolean":
            return True
    return form.get("const")


def _first(document: Schema, schema: Schema, bounds: Bounds, deep: int) -> Any:
    form = next(forms(document, schema), {})
    return largest(document, form, bounds, max(0, deep - 1))


def largest_bodies(document: Schema, bounds: Bounds, deep: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The path, the field, and a body in which that field is as large as `bounds` allow, in each of its forms."""
    for path, schema in body_schemas(document):
        for form in forms(document, schema):
            for name, part in form.get("properties", {}).items():
                for each in forms(document, part):
                    if each.get("type") in ("array", "object", "string", "integer", "number"):
                        yield path, name, {**RIGHT[path], name: largest(document, each, bounds, deep)}
