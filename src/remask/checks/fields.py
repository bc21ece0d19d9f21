"""Declarations of fields: the values that a field takes, its default, its meaning, and the models that it is for.

A declared class is a frozen dataclass whose fields are made by `declare`. Its `__post_init__` calls `check`, and
`parse` makes one of JSON-like values. The command line, the HTTP body and the documentation read `declared`.
"""

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar, cast

from remask.checks import KINDS, ModelKind, in_words
from remask.checks.values import Choice, Values, shown
from remask.errors import ConfigError, UnknownNameError

T = TypeVar("T")
_KEY = "declared"  # of a dataclass field's metadata


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of a field."""

    values: Values  # None is allowed as well if it is the default
    default: Any  # None: the model or the server chooses
    meaning: str  # one sentence
    kinds: tuple[ModelKind, ...] = KINDS  # kinds of models that it applies to
    # Fields with the same `choice` are alternatives: if a request sets one, the server's defaults of all of them are
    # ignored
    choice: str | None = None
    # Of the command line; None: the field's name. If the default is true, these set it to false.
    flags: tuple[str, ...] | None = None
    metavar: str | None = None  # the value in the usage of the flags; None: that of `values`

    @property
    def for_all(self) -> bool:
        """Whether it applies to every kind of model."""
        return self.kinds == KINDS

    @property
    def description(self) -> str:
        """The meaning, followed by the kinds of models unless it applies to all."""
        return self.meaning if self.for_all else f"{self.meaning} For {in_words(self.kinds)} models."

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` if `value` is not allowed; None is allowed if it is the default."""
        if value is not None or self.default is not None:
            self.values.check(name, value)


def declare(
    default: T,
    values: Values,
    meaning: str,
    *,
    kinds: tuple[ModelKind, ...] = KINDS,
    choice: str | None = None,
    flags: tuple[str, ...] | None = None,
    metavar: str | None = None,
    **metadata: Any,
) -> T:
    """A dataclass field with a declaration. Parameters are those of `Declared`, and further metadata of the field."""
    declaration = Declared(values, default, meaning, kinds, choice, flags, metavar)
    return field(default=default, metadata={_KEY: declaration, **metadata})


def optional(kind: ModelKind, values: Values, meaning: str, *, choice: str | None = None) -> Any:
    """A dataclass field, as `declare` makes it, of models of one kind; None by default."""
    return declare(None, values, meaning, kinds=(kind,), choice=choice)


def documented(cls: type[T]) -> type[T]:
    """Append the meanings of a declared class' fields to its docstring. A class decorator."""
    rows = (
        textwrap.fill(f"{name}: {declaration.description}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, declaration in declared(cls).items()
    )
    cls.__doc__ = "\n".join([inspect.getdoc(cls) or "", "", "Attributes:", *rows])
    return cls


def declared(cls: type[Any]) -> dict[str, Declared]:
    """The declarations of a class by name, in their order."""
    return {spec.name: spec.metadata[_KEY] for spec in fields(cls)}


def is_declared(cls: object) -> bool:
    """Whether `cls` is a declared class: a frozen dataclass all of whose fields are made by `declare`."""
    if not isinstance(cls, type) or not is_dataclass(cls):
        return False
    params: Any = getattr(cls, "__dataclass_params__")  # noqa: B009 - which `type` does not declare
    return params.frozen and all(_KEY in spec.metadata for spec in fields(cls))


def check(values: Any, prefix: str = "") -> None:
    """Check the fields of `values`, an instance of a declared class, and replace JSON-like objects by instances.

    Raises `ConfigError` for the first field whose value is not allowed; `prefix` is before its name in the error.
    """
    for spec in fields(values):
        declaration: Declared | None = spec.metadata.get(_KEY)
        value = getattr(values, spec.name)
        if declaration is None or (value is None and declaration.default is None):
            continue
        converted = declaration.values.convert(prefix + spec.metadata.get("setting", spec.name), value)
        if converted is not value:
            object.__setattr__(values, spec.name, converted)


def parse(cls: type[T], values: object, name: str, kind: str, path: str = "") -> T:
    """An instance of the declared class `cls` from a JSON-like object `values`, in which null leaves a field out.

    In errors, `name` names the object, `kind` is what its fields are called, such as "term", and `path` precedes the
    names of fields. Raises `ConfigError` if a value is not allowed or a field is of another class (as
    `unknown_name_error`), and `UnknownNameError` if nothing declares its name.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be an object of {kind}s, got {shown(values)}")
    names = list(declared(cls))
    for key in values:
        if key not in names:
            raise unknown_name_error(cls, kind, str(key), names, path)
    return cls(**{key: value for key, value in values.items() if value is not None})


def unknown_name_error(cls: type[Any], kind: str, name: str, candidates: Iterable[str], path: str = "") -> ConfigError:
    """The error for a `name` that is not one of the `candidates`: an `UnknownNameError` of these arguments, as a rule.

    If a nested class of `cls` has a field `name`, it is "eps belongs in remasking: remasking={'eps': ...}" instead.
    """
    for outer, declaration in declared(cls).items():
        if isinstance(declaration.values, Nested) and name in declared(declaration.values.cls):
            hint = _misplaced_rule_hint(cls, name)
            return ConfigError(f"{hint or name} belongs in {outer}: {outer}={{'{name}': ...}}")
    return UnknownNameError(kind, name, candidates, path)


def _misplaced_rule_hint(cls: type[Any], name: str) -> str:
    """The beginning of the error for a misplaced field whose name a rule has as well; "" if no rule has it.

    Somebody who writes the rule's name with a number may mean the field of `cls` that holds the rule's number. Such as
    "confidence_threshold: did you mean 'threshold'? The field 'confidence_threshold' belongs in remasking: ...".
    """
    groups = [field.values for field in declared(cls).values() if isinstance(field.values, Group)]
    rules = [declared(group.cls)[group.text_field].values for group in groups if group.text_field]
    number_field = next((field for field in declared(cls) if name.endswith(f"_{field}")), None)
    if number_field is None or not any(isinstance(rule, Choice) and rule.fits(name) for rule in rules):
        return ""
    return f"{name}: did you mean {number_field!r}? The field {name!r}"


@dataclass(frozen=True, slots=True)
class Nested(Values):
    """Instances of another declared class, or JSON-like objects for `parse`. `kind` is what its fields are called."""

    converts = True

    cls: type[Any]
    kind: str

    @property
    def words(self) -> str:
        """Such as "an object of renoising fields"."""
        return f"an object of {self.kind}s"

    def fits(self, value: object) -> bool:
        try:
            self.check(self.kind, value)
        except ConfigError:
            return False
        return True

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, self.cls):
            self.convert(name, value)

    def convert(self, name: str, value: Any) -> Any:
        """`value`, or the instance that `parse` makes of it."""
        if isinstance(value, self.cls):
            return value
        return parse(self.cls, value, name, self.kind, f"{name}.")

    def schema(self) -> dict[str, Any]:
        properties = {
            name: {
                "anyOf": [declaration.values.schema(), {"type": "null"}],
                "default": declaration.default,
                "description": declaration.meaning,
            }
            for name, declaration in declared(self.cls).items()
        }
        return {"type": "object", "properties": properties, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Group(Nested):
    """A group of fields that are set one by one: an object, or a text that is the value of the field `text_field`."""

    text_field: str = ""

    @property
    def words(self) -> str:
        """Such as "one of s32/b32, s512/b512, or an object of uniform fields"."""
        objects = f"an object of {self.kind}s"
        return f"{declared(self.cls)[self.text_field].values.words}, or {objects}" if self.text_field else objects

    def convert(self, name: str, value: Any) -> Any:
        if self.text_field and isinstance(value, str):
            value = {self.text_field: value}
        if not isinstance(value, Mapping | self.cls):
            raise ConfigError(f"{name} must be {self.words}, got {shown(value)}")
        return Nested.convert(self, name, value)

    def schema(self) -> dict[str, Any]:
        schema = Nested.schema(self)
        return {"anyOf": [schema, declared(self.cls)[self.text_field].values.schema()]} if self.text_field else schema

    def set_fields(self, name: str, value: Any) -> dict[str, Any]:
        """The fields that `value` sets, by name. Raises `ConfigError` if it is not allowed."""
        values = self.convert(name, value)
        return {inner: setting for inner in declared(self.cls) if (setting := getattr(values, inner)) is not None}


class Grouped(Protocol[T]):
    """The type of a dataclass field of a group: it is set to an instance, an object or a text, and is an instance."""

    def __get__(self, instance: object, owner: Any) -> T: ...

    def __set__(self, instance: object, value: T | Mapping[str, Any] | str) -> None: ...


def grouped(cls: type[T], kind: str, meaning: str, text_field: str = "") -> Grouped[T]:
    """A dataclass field for a `Group` of the fields of `cls`, all of which are None by default."""
    values = Group(cls, kind, text_field=text_field)
    declarations = declared(cls).values()
    kinds = tuple(model for model in KINDS if any(model in declaration.kinds for declaration in declarations))
    group: Any = field(default=cls(), metadata={_KEY: Declared(values, cls(), meaning, kinds)})
    return cast(Grouped[T], group)


def paths(cls: type[Any]) -> dict[str, Declared]:
    """The declarations of `cls` by path: `name`, or `group.name` in its groups."""
    declarations: dict[str, Declared] = {}
    for name, declaration in declared(cls).items():
        if isinstance(declaration.values, Group):
            declarations |= {f"{name}.{inner}": nested for inner, nested in declared(declaration.values.cls).items()}
        else:
            declarations[name] = declaration
    return declarations


def by_path(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` of fields of `cls` that are set, by path. Raises `ConfigError` if a group is not allowed."""
    result: dict[str, Any] = {}
    declarations = declared(cls)
    for name, value in values.items():
        if value is not None and name in declarations and isinstance(group := declarations[name].values, Group):
            result |= {f"{name}.{inner}": setting for inner, setting in group.set_fields(name, value).items()}
        elif value is not None:
            result[name] = value
    return result


def by_group(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `by_path`: an object for each group, or a text if only the group's field `text_field` is set."""
    groups: dict[str, Any] = {}
    for path, value in values.items():
        name, _, inner = path.partition(".")
        if inner:
            groups.setdefault(name, {})[inner] = value
        else:
            groups[name] = value
    for name, declaration in declared(cls).items():
        group = declaration.values
        if isinstance(group, Group) and list(groups.get(name, ())) == [group.text_field]:
            groups[name] = groups[name][group.text_field]
    return groups
