"""Checks of values that users give. Each raises `ConfigError` naming the field, the value and what is allowed.

A set of values is an object (`Whole`, `Real`, `Choice`, ...), so that the same range decides what is accepted, what an
error says, what the documentation lists and what an OpenAPI document promises. The functions below check one value.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from remask.checks.plugins import Registry
from remask.errors import ConfigError, UnknownNameError

LARGEST = 2**63 - 1
POSITIONS = 2**24  # no canvas is longer, and float32 holds every whole number up to it
LIST = 2**17  # items of one list of positions or token ids: no model's canvas is longer
OBJECT = 2**16  # characters of the JSON of a small object, such as settings
SHOWN = 100  # characters of a refused value in its error


class Values(ABC):
    """A set of values."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The set in words that follow "must be"."""

    @abstractmethod
    def fits(self, value: object) -> bool:
        """Whether `value` is in the set."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The set as a JSON Schema."""

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` where `value` is not in the set; `name` is the field in the error."""
        if not self.fits(value):
            raise ConfigError(f"{name} must be {self.words}, got {shown(value)}")

    @property
    def makes(self) -> bool:
        """Whether `made` returns other objects than it is given."""
        return False

    def made(self, name: str, value: Any) -> Any:
        """Check `value` and return what a declared class holds of it: itself, or an object that is made of it."""
        self.check(name, value)
        return value


@dataclass(frozen=True, slots=True)
class Whole(Values):
    """Whole numbers from `low` to `high`."""

    low: int
    high: int = LARGEST

    @property
    def words(self) -> str:
        """Such as "a whole number from 1 to 2**63 - 1"."""
        return f"a whole number from {_bound(self.low)} to {_bound(self.high)}"

    def fits(self, value: object) -> bool:
        """Whether `value` is an `int`, no `bool`, within the range."""
        return is_whole(value, self.low, self.high)

    def schema(self) -> dict[str, Any]:
        """An integer with both bounds."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Real(Values):
    """Finite numbers from `low` (`above` it, where that is set) to `high`."""

    low: float
    high: float = math.inf
    above: bool = False

    @property
    def words(self) -> str:
        """Such as "a number above 0 to 1"."""
        end = f" to {self.high:g}" if self.high < math.inf else " up"
        return f"a number {'above' if self.above else 'from'} {self.low:g}{end}"

    def fits(self, value: object) -> bool:
        """Whether `value` is a finite number within the range that a float can hold."""
        return is_real(value, self.low, self.high) and not (self.above and value == self.low)

    def schema(self) -> dict[str, Any]:
        """A number with the bounds that are finite."""
        schema: dict[str, Any] = {"type": "number"}
        schema["exclusiveMinimum" if self.above else "minimum"] = self.low
        # Beyond this, whole numbers in JSON are refused.
        return schema | {"maximum": self.high if self.high < math.inf else LARGEST}


@dataclass(frozen=True, slots=True)
class Flag(Values):
    """True and false."""

    @property
    def words(self) -> str:
        """The two values."""
        return "true or false"

    def fits(self, value: object) -> bool:
        """Whether `value` is a `bool`."""
        return isinstance(value, bool)

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Choice(Values):
    """A few names."""

    names: tuple[str, ...]

    @property
    def words(self) -> str:
        """All of the names."""
        return "one of " + ", ".join(self.names)

    def fits(self, value: object) -> bool:
        """Whether `value` is one of the names."""
        return value in self.names

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return {"type": "string", "enum": list(self.names)}

    def check(self, name: str, value: object) -> None:
        """Raise `UnknownNameError`, which suggests the nearest name."""
        if not self.fits(value):
            raise UnknownNameError(name, str(value)[:SHOWN], self.names)


@dataclass(frozen=True, slots=True)
class Registered(Values):
    """Names of a registry, also of other packages. A package is imported when its name is first used."""

    registry: Registry[Any]

    @property
    def words(self) -> str:
        """All of the names."""
        return "one of " + ", ".join(self.registry.names())

    def fits(self, value: object) -> bool:
        """Whether `value` is one of the names."""
        return value in self.registry.names()

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return {"type": "string", "enum": list(self.registry.names())}

    def check(self, name: str, value: object) -> None:
        """Raise `UnknownNameError`, which suggests the nearest name, or `PluginError` where a package is at fault."""
        if not self.fits(value):
            raise UnknownNameError(name, str(value)[:SHOWN], self.registry.names())
        self.registry.get(str(value))


@dataclass(frozen=True, slots=True)
class Text(Values):
    """Texts of valid Unicode of at most `most` characters; `empty` ones only where that is set.

    `noun` names them, in place of "a text".
    """

    most: int
    empty: bool = False
    noun: str | None = None

    @property
    def words(self) -> str:
        """The noun, or a text and whether it may be empty, and the longest."""
        words = self.noun or "a text of valid Unicode" + ("" if self.empty else " that is not empty")
        return f"{words}, of at most {self.most} characters"

    def fits(self, value: object) -> bool:
        """Whether `value` is a text without lone surrogates, which no encoding can carry."""
        if not isinstance(value, str) or len(value) > self.most:
            return False
        return (self.empty or value != "") and not _has_surrogates(value)

    def schema(self) -> dict[str, Any]:
        """A string with its bounds."""
        return {"type": "string", "maxLength": self.most} | ({} if self.empty else {"minLength": 1})


@dataclass(frozen=True, slots=True)
class ListOf(Values):
    """Lists and tuples of at most `most` values of one set; `noun` names them.

    With `single`, one value may be given instead of a list of it. `together` bounds the number of all values in the
    list, at any depth; they are counted before any of them is checked.
    """

    of: Values
    noun: str
    most: int
    single: bool = False
    together: int | None = None

    @property
    def words(self) -> str:
        """Such as "a list of at most 16 token ids"."""
        words = f"a list of at most {self.most} {self.noun}"
        if self.together is not None:
            words += f", with at most {self.together} values in it altogether"
        return f"{self.of.words}, or {words}" if self.single else words

    def fits(self, value: object) -> bool:
        """Whether `value` is such a list."""
        if self.single and self.of.fits(value):
            return True
        if not isinstance(value, list | tuple) or len(value) > self.most or self._too_much(value):
            return False
        return all(map(self.of.fits, value))

    def schema(self) -> dict[str, Any]:
        """An array with its bound, or an item."""
        array = {"type": "array", "items": self.of.schema(), "maxItems": self.most}
        return {"anyOf": [self.of.schema(), array]} if self.single else array

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` that gives the length of a list that is too long, or names the first wrong item."""
        if isinstance(value, list | tuple) and len(value) > self.most:
            raise ConfigError(f"{name} holds {len(value)} items; it must be {self.words}")
        if self._too_much(value):
            raise ConfigError(f"{name} holds more than {self.together} values altogether; it must be {self.words}")
        if self.fits(value):
            return
        for index, item in enumerate(value if isinstance(value, list | tuple) else ()):
            self.of.check(f"{name}[{index}]", item)
        Values.check(self, name, value)

    def made(self, name: str, value: Any) -> Any:
        """The list itself, or a tuple of what its items make."""
        if not self.makes or not isinstance(value, list | tuple) or len(value) > self.most or self._too_much(value):
            self.check(name, value)
            return value
        return tuple(self.of.made(f"{name}[{index}]", item) for index, item in enumerate(value))

    @property
    def makes(self) -> bool:
        """Whether its items make objects."""
        return self.of.makes

    def _too_much(self, value: object) -> bool:
        return self.together is not None and weight(value, self.together) > self.together


@dataclass(frozen=True, slots=True)
class AnyOf(Values):
    """Values of any of some sets, the last of which is one of objects."""

    sets: tuple[Values, ...]

    @property
    def words(self) -> str:
        """Those of all sets."""
        return ", or ".join(each.words for each in self.sets)

    def fits(self, value: object) -> bool:
        """Whether `value` is in one of the sets."""
        return any(each.fits(value) for each in self.sets)

    def schema(self) -> dict[str, Any]:
        """A choice of schemas."""
        return {"anyOf": [each.schema() for each in self.sets]}

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError`; of an object it says which of its fields is not allowed."""
        if isinstance(value, Mapping):
            self.sets[-1].check(name, value)
        else:
            Values.check(self, name, value)


@dataclass(frozen=True, slots=True)
class Biases(Values):
    """Objects of at most `most` token ids, each with a number from -`size` to `size`.

    JSON has texts as keys, so an id may be one. What is made of it has numbers.
    """

    most: int
    size: float

    @property
    def words(self) -> str:
        """Such as "an object of at most 8 token ids, each with a number from -1 to 1"."""
        return f"an object of at most {self.most} token ids, each with a number from -{self.size:g} to {self.size:g}"

    def fits(self, value: object) -> bool:
        """Whether `value` is such a mapping, which names each token once."""
        if not isinstance(value, Mapping) or len(value) > self.most:
            return False
        ids = [_token_id(key) for key in value]
        return None not in ids and len(set(ids)) == len(ids) and all(self._fits(each) for each in value.values())

    def schema(self) -> dict[str, Any]:
        """An object with its bounds."""
        number = {"type": "number", "minimum": -self.size, "maximum": self.size}
        names = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,7})$"}
        return {
            "type": "object",
            "maxProperties": self.most,
            "propertyNames": names,
            "additionalProperties": number,
            "description": self.words,
        }

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` that names the first entry that is not allowed."""
        if isinstance(value, Mapping) and len(value) <= self.most:
            for key, number in value.items():
                if _token_id(key) is not None and not self._fits(number):
                    raise ConfigError(
                        f"{name}[{key}] must be a number from -{self.size:g} to {self.size:g}, got {shown(number)}"
                    )
        Values.check(self, name, value)

    @property
    def makes(self) -> bool:
        """It makes objects whose keys are numbers."""
        return True

    def made(self, name: str, value: Any) -> Any:
        """A dictionary from token ids to numbers."""
        self.check(name, value)
        return {_token_id(key): float(number) for key, number in value.items()}

    def _fits(self, number: object) -> bool:
        return is_real(number, -self.size, self.size)


def _token_id(key: object) -> int | None:
    """The token id that a key of an object is; None where it is none."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 8 and str(int(key)) == key:
        return int(key)
    return key if is_whole(key, 0, POSITIONS) else None


@dataclass(frozen=True, slots=True)
class Settings(Values):
    """Objects of at most `most` keys, which are checked where they are used; `noun` says what they hold.

    Keys, values and all that is within them have at most `chars` characters as JSON, about; they are counted before
    anything else is done with them.
    """

    noun: str
    most: int
    chars: int = OBJECT

    @property
    def words(self) -> str:
        """Such as "an object of at most 8 settings"."""
        return f"an object of at most {self.most} {self.noun} and {self.chars} characters"

    def fits(self, value: object) -> bool:
        """Whether `value` is a mapping with texts as keys."""
        if (
            not isinstance(value, Mapping)
            or len(value) > self.most
            or weight(value, self.chars, texts=True) > self.chars
        ):
            return False
        return all(isinstance(key, str) for key in value)

    def schema(self) -> dict[str, Any]:
        """An object of any keys."""
        return {"type": "object", "maxProperties": self.most, "description": self.words}


def weight(value: object, most: int, *, texts: bool = False) -> int:
    """How many values a JSON-like value is, itself and all within it; with `texts` each character of a text counts.

    The counting ends beyond `most`, so it takes no more than `most` steps however much there is.
    """
    found, held = 0, [value]
    while held and found <= most:
        each = held.pop()
        found += 1 + (len(each) if texts and isinstance(each, str) else 0)
        if isinstance(each, Mapping | list | tuple):
            if found + len(held) + len(each) > most:
                return most + 1
            if isinstance(each, Mapping):
                found += sum(len(key) for key in each if isinstance(key, str)) if texts else 0
                held.extend(each.values())
            else:
                held.extend(each)
    return found


def is_whole(value: object, low: int, high: int = LARGEST) -> TypeGuard[int]:
    """Whether `value` is an `int`, no `bool`, from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_real(value: object, low: float, high: float = math.inf) -> TypeGuard[float]:
    """Whether `value` is a finite number from `low` to `high`, no `bool`, which a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return False
    # Whole numbers from JSON may exceed what a float can hold.
    return abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value)


def whole(name: str, value: object, low: int, high: int = LARGEST, *, optional: bool = False) -> None:
    """A whole number from `low` to `high`; `optional` allows None."""
    _check(Whole(low, high), name, value, optional)


def real(
    name: str, value: object, low: float, high: float = math.inf, *, above: bool = False, optional: bool = False
) -> None:
    """A finite number from `low` (or `above` it) to `high`; `optional` allows None."""
    _check(Real(low, high, above), name, value, optional)


def flag(name: str, value: object) -> None:
    """True or false."""
    Flag().check(name, value)


def one_of(name: str, value: object, names: Iterable[str]) -> None:
    """One of a few names. Raises `UnknownNameError`."""
    Choice(tuple(names)).check(name, value)


def listed(name: str, value: object, of: str) -> Sequence[Any]:
    """A list or tuple; `of` says of what."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list of {of}, got {shown(value)}")
    return value


def json_object(what: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`; `what` names it in errors."""
    value = _parsed(what, text)
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def json_list(what: str, text: str) -> list[Any]:
    """The JSON list in `text`; `what` names it in errors."""
    value = _parsed(what, text)
    if not isinstance(value, list):
        raise ConfigError(f"{what} must be a JSON list, got {type(value).__name__}")
    return value


def _parsed(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and too many brackets
        raise ConfigError(f"{what} is not JSON: {error}") from error


def shown(value: object) -> str:
    """A refused value, short enough for an error."""
    # Only the beginning is shown, so no more of a long one is looked at.
    text = repr(value[: SHOWN + 1] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _check(values: Values, name: str, value: object, optional: bool) -> None:
    if value is None and optional:
        return
    if optional and not values.fits(value):
        raise ConfigError(f"{name} must be {values.words}, or null, got {shown(value)}")
    values.check(name, value)


def _bound(value: int) -> str:
    return {LARGEST: "2**63 - 1", -LARGEST: "-(2**63 - 1)"}.get(value, str(value))


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)
