"""Fields of requests, each declared once: the values that it takes, its default, its meaning, the models it is for.

A declared class is a frozen dataclass whose fields are made by `declare`. Its `__post_init__` calls `check`, and
`parse` makes one of JSON-like values. The command line, the HTTP body and the documentation read `declared`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from remask.checks.kinds import KINDS, ModelKind, in_words
from remask.checks.values import Values, one_of, shown
from remask.errors import ConfigError, UnknownNameError

T = TypeVar("T")
_KEY = "declared"  # of a dataclass field's metadata


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of a field.

    Attributes:
        values: the values that it takes, None aside.
        default: None leaves the choice to the model or the server.
        meaning: one sentence.
        kinds: kinds of models on which it has a meaning.
        group: fields of one group are ways to make one choice: where a request sets one of them, the server's defaults
            of all of them give way.
    """

    values: Values
    default: Any
    meaning: str
    kinds: tuple[ModelKind, ...] = KINDS
    group: str | None = None

    @property
    def for_all(self) -> bool:
        """Whether it has a meaning on every kind of model."""
        return self.kinds == KINDS

    @property
    def described(self) -> str:
        """The meaning, and the kinds of models where they are not all."""
        return self.meaning if self.for_all else f"{self.meaning} For {in_words(self.kinds)} models."

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` where `value` is not allowed; None is allowed where it is the default."""
        if value is not None or self.default is not None:
            self.values.check(name, value)


def declare(
    default: T, values: Values, meaning: str, *, kinds: tuple[ModelKind, ...] = KINDS, group: str | None = None
) -> T:
    """A field of a declared class; the parameters are those of `Declared`."""
    return field(default=default, metadata={_KEY: Declared(values, default, meaning, kinds, group)})


def declared(cls: type[Any]) -> dict[str, Declared]:
    """The declarations of a class by name, in their order."""
    return {item.name: item.metadata[_KEY] for item in fields(cls)}


def check(values: Any, prefix: str = "") -> None:
    """Check the fields of a declared class, and put objects of other declared classes in place of JSON-like ones.

    Raises `ConfigError` for the first field whose value is not allowed, which it names with `prefix` before its name.
    """
    for item in fields(values):
        declaration: Declared = item.metadata[_KEY]
        value = getattr(values, item.name)
        if value is None and declaration.default is None:
            continue
        made = declaration.values.made(prefix + item.name, value)
        if made is not value:
            object.__setattr__(values, item.name, made)


def parse(cls: type[T], values: object, name: str, item: str) -> T:
    """A declared class from JSON-like values, in which null leaves a field out.

    `name` is what holds the values, `item` one of its fields, in errors. Raises `ConfigError` on values that are not
    allowed and `UnknownNameError` on names that are not declared.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be an object of {item}s, got {shown(values)}")
    known = list(declared(cls))
    for key in values:
        if key not in known:
            raise UnknownNameError(item, str(key), known)
    return cls(**{key: value for key, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Nested(Values):
    """Values of another declared class, objects that `parse` makes one of, or names of presets.

    `item` names a field of the class.
    """

    cls: type[Any]
    item: str
    presets: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Such as "an object of slowfast knobs"."""
        return " or ".join([f"an object of {self.item}s", *map(repr, self.presets)])

    def fits(self, value: object) -> bool:
        """Whether `value` is an instance, or an object that makes one."""
        try:
            self.check(self.item, value)
        except ConfigError:
            return False
        return True

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` naming the first field that is not allowed."""
        if isinstance(value, str) and self.presets:
            one_of(name, value, self.presets)
        elif not isinstance(value, self.cls):
            self.made(name, value)

    @property
    def makes(self) -> bool:
        """It makes objects of the class."""
        return True

    def made(self, name: str, value: Any) -> Any:
        """The object that `parse` makes, or the name of a preset. Each is made once, which checks it."""
        if isinstance(value, self.cls):
            return value
        if isinstance(value, str) and self.presets:
            self.check(name, value)
            return value
        return parse(self.cls, value, name, self.item)

    def schema(self) -> dict[str, Any]:
        """An object of the declared fields, each of which may be null or left out, or a preset's name."""
        properties = {
            name: {
                "anyOf": [declaration.values.schema(), {"type": "null"}],
                "default": declaration.default,
                "description": declaration.meaning,
            }
            for name, declaration in declared(self.cls).items()
        }
        found = {"type": "object", "properties": properties, "additionalProperties": False}
        return {"anyOf": [found, {"type": "string", "enum": list(self.presets)}]} if self.presets else found
