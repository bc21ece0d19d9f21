"""The forms that a request may require of its answer: a regular expression, one of some texts, or JSON by a schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from remask.checks.fields import check, declare, documented, parse
from remask.checks.values import Flag, ListOf, Settings, Text, parse_json
from remask.errors import ConfigError
from remask.request.json_schema import escape, expression_of
from remask.request.schema_parts import whole_regex

MAX_PATTERN = 2**14
"""Characters of a regular expression, a schema as it is sent, or all choices together."""


class FormSource(NamedTuple):
    """What is compiled of a form."""

    kind: Literal["regex", "json"]
    expression: str  # a regular expression, that of the texts that the schema allows for "json"


@documented
@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an answer; one of the fields is set. Raises `ConfigError` when made, naming the field."""

    regex: str | None = declare(
        None, Text(MAX_PATTERN), "The whole answer matches this regular expression; anchors change nothing at its ends."
    )
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
        forms = [name for name in ("regex", "choice", "json") if getattr(self, name) is not None]
        forms += ["json_object"] if self.json_object else []
        if len(forms) != 1:
            raise ConfigError(
                "structured_outputs needs exactly one of regex, choice, json and json_object; got "
                + (", ".join(forms) or "none")
            )
        if self.choice is not None and not self.choice:
            raise ConfigError("structured_outputs.choice holds no text; give one at least")
        expression = self.source.expression  # raises ConfigError if a schema cannot be guaranteed
        if self.json is None and len(expression) > MAX_PATTERN:
            raise ConfigError(f"structured_outputs.{forms[0]} is too long; at most {MAX_PATTERN} characters are taken")

    @classmethod
    def from_mapping(cls, values: object) -> "StructuredOutputs":
        """Build a form from JSON-like values.

        Raises `ConfigError` on unknown names, on values that are not allowed, and on vLLM's `grammar`.
        """
        if isinstance(values, Mapping) and values.get("grammar") is not None:
            raise ConfigError(
                "structured_outputs.grammar is not supported: tokens are written in any order, which needs a finite "
                "automaton, and a context-free grammar has none; use regex, json or choice, with a limit of depth"
            )
        return parse(cls, values, "structured_outputs", "structured_outputs field")

    @cached_property
    def source(self) -> FormSource:
        """The kind of the form, and the regular expression to compile. Raises `ConfigError` on refused schemas."""
        if self.regex is not None:
            return FormSource("regex", whole_regex(self.regex))
        if self.choice is not None:
            return FormSource("regex", "|".join(map(escape, self.choice)))
        if self.json is not None:
            return FormSource("json", expression_of(self._plain_schema, "structured_outputs.json"))
        return FormSource("json", expression_of({"type": "object"}, "structured_outputs.json_object"))

    @property
    def _plain_schema(self) -> Any:
        """A copy of the schema in plain JSON values. Raises `ConfigError` if it is not JSON."""
        try:
            return parse_json(json.dumps(self.json, allow_nan=False))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"structured_outputs.json is no JSON: {error}") from error
