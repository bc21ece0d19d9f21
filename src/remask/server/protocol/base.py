"""What all bodies are made of: a strict object, texts and names that have a bound, and declared fields."""

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from remask.checks.fields import Declared, declared, unknown_name_error
from remask.checks.values import LARGEST, shown
from remask.errors import ConfigError, UnknownNameError
from remask.policies.registry import check_setting
from remask.request.sampling_params import SamplingParams
from remask.request.terms import flatten_sampling
from remask.server.config import MAX_ITEMS

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

MAX_KEYWORDS = 64  # of the outermost level of a JSON schema
MAX_TOKEN_IDS = 1 << 20
MAX_NAME = 1024  # characters of a name that somebody chose: of a model, a user, a call
MAX_TEXT = 1 << 24  # characters of any text; the server's own limits are below it

# The first item that does not fit ends the check: a list may hold a million of them.
Count: TypeAlias = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Items: TypeAlias = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
TokenIds: TypeAlias = Annotated[list[Count], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Name: TypeAlias = Annotated[str, Field(max_length=MAX_NAME)]
LongText: TypeAlias = Annotated[str, Field(max_length=MAX_TEXT)]
Texts: TypeAlias = Items[LongText]
TokenLists: TypeAlias = Items[TokenIds]


# Kinds of parts and tools that other APIs know and no served model does: each refused in a sentence.
_TEXT = "the models read and write text alone, so say in text what the model should know"
_KEPT = "nothing is kept beyond an answer, so send what is referred to"
NO_SERVER_TOOLS = "the server runs no tools: offer a function, and run it where its call arrives"
_SCHEMA = "calls have arguments of a schema: offer a function"
_REFUSED_OF_PAST = {"audio": _TEXT, "function_call": "`tool_calls` is its newer name"}
"""Fields of a past turn that would mean something to a model and so are not ignored, and why they are refused."""
_TEXT_KINDS = {"image", "input_image", "image_url", "input_file", "file", "document", "input_audio", "audio"}
_KEPT_KINDS = {"item_reference", "container_upload", "compaction"}
_HOSTED = re.compile(
    r"(\w+:)?(([a-z]+_)?search|web_fetch|url_context|code_(execution|interpreter)|image_generation|mcp|computer|browser|"
    r"bash|shell|local_shell|text_editor|apply_patch|memory|advisor|namespace|programmatic_tool_calling)(_\w+)?",
    re.ASCII,
)
MAX_KIND = 64
"""Characters of the name of a type."""


def check_kind(field: str, value: Any, kinds: Collection[str]) -> Any:
    """Return `value` unchanged. Raises `ConfigError` if it is an object whose `type` is a text that is not in `kinds`.

    `field` holds the value; the error names it.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind in kinds:
        return value
    reason = _TEXT if kind in _TEXT_KINDS else _KEPT if kind in _KEPT_KINDS else None
    if field == "tools":
        reason = _SCHEMA if kind == "custom" else NO_SERVER_TOOLS
    allowed = ", ".join(map(repr, sorted(kinds)))
    raise ConfigError(
        f"{field}: the type {kind[:MAX_KIND]!r} is not supported{f', as {reason}' if reason else ''}; send {allowed}"
    )


def is_hosted(kind: object) -> bool:
    """Whether a tool of this type is run by the server of another API, or known to its own models only."""
    return isinstance(kind, str) and len(kind) <= MAX_KIND and _HOSTED.fullmatch(kind) is not None


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "seed": (-1,),
    "top_k": (-1, 0),
}
"""Values of honoured fields that leave them out."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A field of other servers' bodies that is not honoured.

    It is ignored where any value may come, as none could change an answer, and else refused.

    Attributes:
        reason: why it is ignored or refused.
        neutral: values that ask for nothing, beside null. None says that every value is ignored.
    """

    reason: str
    neutral: tuple[Any, ...] | None = ()

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` on a value that asks for something."""
        if self.neutral is None or value is None or _is_among(value, self.neutral):
            return
        allowed = " or ".join(map(json.dumps, (None, *self.neutral)))
        raise ConfigError(
            f"{name} is not supported: {self.reason}. Leave it out, or send {allowed}; got {shown(value)}"
        )


_TEXTS_NAMES = ("messages", "prompt", "input")
"""The field that holds the texts of a body, by its endpoint."""


def read_fields(body: Any, field_names: Iterable[str], foreign: Mapping[str, Foreign]) -> Any:
    """Return the fields of `body` that are in `field_names` and not neutral. Returns what is no object unchanged.

    Sampling parameters may be in an object `sampling`, if the body has any. Raises `ConfigError` on a field in the
    wrong place and on a `foreign` one that asks for something, and `UnknownNameError` on unknown names.
    """
    if not isinstance(body, Mapping):
        return body
    names = frozenset(field_names)
    if names >= declared(SamplingParams).keys():
        body = flatten_sampling(body, names | foreign.keys())
    fields = {}
    for name, value in body.items():
        if value is not None and _is_among(value, _NEUTRAL.get(name, ())):
            continue
        if name in names:
            fields[name] = value
        elif name not in foreign:
            texts_name = next((texts for texts in _TEXTS_NAMES if texts in names), None)
            if name in _TEXTS_NAMES and texts_name is not None:
                raise ConfigError(f"{name} is a field of other endpoints, and this one takes {texts_name}; send that")
            if "cache_config" in names:
                check_setting(str(name))
            raise unknown_name_error(SamplingParams, "field", str(name), names | foreign.keys())
        else:
            foreign[name].check(name, value)
    return fields


def _is_among(value: object, neutral: Iterable[object]) -> bool:
    """Whether `value` is one of `neutral`, where true does not equal 1."""
    return any(value == candidate and isinstance(value, bool) == isinstance(candidate, bool) for candidate in neutral)


class Body(BaseModel):
    """A body or a part of one, with strict JSON types (no text for numbers) and without NaN.

    Unknown fields whose value is null are ignored, and others refused, with the exceptions below.

    Attributes:
        foreign: of a whole body, the fields that it has on other servers, which are ignored or refused for a reason.
        ignored: fields of a part that are ignored whatever their value.
        past: the part is of an earlier turn, which a client sends back as it got it. All its unknown fields are
            ignored, as no model reads them, unless one may be the misspelt name of a missing field.
        kinds: the values that its `type` may have; empty if it has no such field.
        container: the field of the body that holds the part, for errors.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    foreign: ClassVar[Mapping[str, Foreign] | None] = None
    ignored: ClassVar[Collection[str] | None] = None
    past: ClassVar[bool] = False
    kinds: ClassVar[Collection[str]] = ()
    container: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        """Remove the unknown fields that the class allows. Raises `UnknownNameError` or `ConfigError` on others."""
        if cls.foreign is not None:
            return read_fields(body, cls.model_fields, cls.foreign)
        if cls.kinds:
            check_kind(cls.container, body, cls.kinds)
        if not isinstance(body, Mapping):
            return body
        for name, reason in _REFUSED_OF_PAST.items() if cls.past else ():
            if body.get(name):
                raise ConfigError(f"{cls.container}: {name} is not supported, as {reason}; leave it out")
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        names = fields.keys()
        required = {name for name, field in fields.items() if cls.past and field.is_required()}
        values = dict(body)
        if cls.past or cls.ignored is not None:
            ignored = cls.ignored or ()
            values = {
                name: value
                for name, value in body.items()
                if (value is not None or name in required) and name not in ignored
            }
        missing = required - values.keys()
        for name, value in values.items():
            may_be_misspelt = bool(difflib.get_close_matches(str(name), missing))
            if name not in names and value is not None and (may_be_misspelt or not cls.past):
                raise UnknownNameError("field", str(name), names)
        return {name: value for name, value in values.items() if name in names}


@dataclass(frozen=True, slots=True)
class Checked:
    """Makes pydantic check the field `name` of a body as its declaration says. Null leaves the field out."""

    name: str
    declaration: Declared

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = {"anyOf": [self.declaration.values.schema(), {"type": "null"}]}
        return {**schema, "description": self.declaration.description}

    def _check(self, value: object) -> object:
        if value is not None:
            return self.declaration.values.convert(self.name, value)
        return None


def with_declared(*classes: type[Any]) -> Callable[[type[B]], type[B]]:
    """Return a decorator that adds the declared fields of `classes` to a body, with None as their default."""
    definitions: dict[str, Any] = {
        name: (Annotated[Any, Checked(name, declaration)], Field(default=None))
        for cls in classes
        for name, declaration in declared(cls).items()
    }

    def add(body: type[B]) -> type[B]:
        return create_model(
            body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **definitions
        )

    return add


def declared_fields(body: BaseModel, cls: type[Any]) -> dict[str, Any]:
    """The declared fields of `cls` that `body` sets, by name."""
    values = ((name, getattr(body, name)) for name in declared(cls))
    return {name: value for name, value in values if value is not None}
