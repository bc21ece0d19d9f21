"""Checks of values that users give. Each raises `ConfigError` naming the field, the value and what is allowed.

A set of values is an object (`Whole`, `Real`, `Choice`, ...), from which checks, errors, documentation and the OpenAPI
document follow. The functions `check_...` below check one value.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard, TypeVar

from remask.checks.plugins import Registry
from remask.errors import ConfigError, UnknownNameError

T = TypeVar("T")

LARGEST = 2**63 - 1
POSITIONS = 2**24  # the longest canvas that may be asked for; float32 holds every whole number up to it
LIST = 2**17  # items of one list of positions or token ids; no model's canvas is longer
OBJECT = 2**16  # characters of the JSON of a small object, such as settings
SHOWN = 100  # characters of a refused value in its error
MAX_DEPTH = 128  # nesting of lists and objects in JSON: far below Python's limit of recursion
_MARK = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)  # texts and brackets; no text is read twice


class Values(ABC):
    """A set of values."""

    converts: ClassVar[bool] = False  # `convert` may return another object than its argument

    @property
    @abstractmethod
    def words(self) -> str:
        """The set, in words that follow "must be"."""

    @abstractmethod
    def fits(self, value: object) -> bool:
        """Whether `value` is in the set."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The set as a JSON Schema."""

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` if `value` is not in the set; `name` is the field in the error."""
        if not self.fits(value):
            raise ConfigError(f"{name} must be {self.words}, got {shown(value)}")

    def convert(self, name: str, value: Any) -> Any:
        """Check `value`, and return the value of a declared class' field: `value`, or an object made of it."""
        self.check(name, value)
        return value

    @property
    def metavar(self) -> str:
        """The name of the value in the usage of a flag."""
        return "JSON"

    def from_text(self, text: str) -> Any:
        """The value of a word on a command line, not checked. Raises `ValueError` if it cannot be read."""
        return parse_json(text)


@dataclass(frozen=True, slots=True)
class Whole(Values):
    """Whole numbers from `low` to `high`."""

    metavar = "N"

    low: int
    high: int = LARGEST

    @property
    def words(self) -> str:
        return f"a whole number from {_bound(self.low)} to {_bound(self.high)}"

    def fits(self, value: object) -> bool:
        return is_whole(value, self.low, self.high)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def from_text(self, text: str) -> int:
        return int(text)


@dataclass(frozen=True, slots=True)
class Real(Values):
    """Finite numbers from `low` to `high`; with `above`, without `low`."""

    metavar = "X"

    low: float
    high: float = math.inf
    above: bool = False

    @property
    def words(self) -> str:
        end = f" to {self.high:g}" if self.high < math.inf else "" if self.above else " up"
        return f"a number {'above' if self.above else 'from'} {self.low:g}{end}"

    def fits(self, value: object) -> bool:
        return is_real(value, self.low, self.high) and not (self.above and value == self.low)

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        schema["exclusiveMinimum" if self.above else "minimum"] = self.low
        # Larger whole numbers in JSON are refused.
        return schema | {"maximum": self.high if self.high < math.inf else LARGEST}

    def from_text(self, text: str) -> float:
        return float(text)


class Seconds(Real):
    """Times."""

    metavar = "S"


@dataclass(frozen=True, slots=True)
class Share(Real):
    """Numbers from 0 to 1; a command line may have a fraction, or "off" for 0."""

    low: float = 0.0
    high: float = 1.0

    metavar = "SHARE|1/N|off"

    def from_text(self, text: str) -> float:
        if text == "off":
            return 0.0
        numerator, _, denominator = text.partition("/")
        try:
            return float(numerator) / float(denominator or 1)
        except ZeroDivisionError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class OrWord(Values):
    """The values of a set, and one word."""

    values: Values
    word: str

    @property
    def words(self) -> str:
        return f"{self.values.words}, or {self.word!r}"

    def fits(self, value: object) -> bool:
        return value == self.word or self.values.fits(value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.values.schema(), {"const": self.word}]}

    @property
    def metavar(self) -> str:
        return f"{self.values.metavar}|{self.word}"

    def from_text(self, text: str) -> Any:
        return text if text == self.word else self.values.from_text(text)


@dataclass(frozen=True, slots=True)
class OrNull(Values):
    """None and the values of a set."""

    values: Values

    @property
    def words(self) -> str:
        return f"{self.values.words}, or null"

    def fits(self, value: object) -> bool:
        return value is None or self.values.fits(value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.values.schema(), {"type": "null"}]}


@dataclass(frozen=True, slots=True)
class Flag(Values):
    """True and false."""

    words = "true or false"

    def fits(self, value: object) -> bool:
        return isinstance(value, bool)

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Choice(Values):
    """A few names, or those of a registry, whose packages are imported when a name is first used."""

    source: tuple[str, ...] | Registry[Any]

    @property
    def names(self) -> tuple[str, ...]:
        """All names; no package is imported."""
        return self.source.names() if isinstance(self.source, Registry) else self.source

    @property
    def words(self) -> str:
        return "one of " + ", ".join(self.names)

    def fits(self, value: object) -> bool:
        return value in self.names

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.names)}

    @property
    def metavar(self) -> str:
        return "|".join(self.names)

    def from_text(self, text: str) -> str:
        return text

    def check(self, name: str, value: object) -> None:
        """Raise `UnknownNameError` for another name, or `PluginError` if the name's package is broken."""
        if not self.fits(value):
            raise UnknownNameError(name, value[:SHOWN] if isinstance(value, str) else shown(value), self.names)
        if isinstance(self.source, Registry):
            self.source.get(str(value))


@dataclass(frozen=True, slots=True)
class Text(Values):
    """Texts of valid Unicode of at most `limit` characters; empty ones only with `empty`. `noun` is used in `words`."""

    metavar = "TEXT"

    limit: int
    empty: bool = False
    noun: str | None = None

    @property
    def words(self) -> str:
        words = self.noun or "a text of valid Unicode" + ("" if self.empty else " that is not empty")
        return f"{words}, of at most {self.limit} characters"

    def fits(self, value: object) -> bool:
        if not isinstance(value, str) or len(value) > self.limit:
            return False
        surrogates = not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value)
        return (self.empty or value != "") and not surrogates

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": self.limit} | ({} if self.empty else {"minLength": 1})

    def from_text(self, text: str) -> str:
        return text


@dataclass(frozen=True, slots=True)
class ListOf(Values):
    """Lists and tuples of at most `limit` values of a set; `noun` is used in `words`.

    With `single`, one value may be given instead of a list. `total_limit` bounds the number of all values in the list,
    at any depth; they are counted before any of them is checked.
    """

    values: Values
    noun: str
    limit: int
    single: bool = False
    total_limit: int | None = None

    @property
    def words(self) -> str:
        words = f"a list of at most {self.limit} {self.noun}"
        if self.total_limit is not None:
            words += f", with at most {self.total_limit} values in it altogether"
        return f"{self.values.words}, or {words}" if self.single else words

    def fits(self, value: object) -> bool:
        if self.single and self.values.fits(value):
            return True
        if not isinstance(value, list | tuple) or len(value) > self.limit or self._has_too_many_values(value):
            return False
        return all(map(self.values.fits, value))

    def schema(self) -> dict[str, Any]:
        array = {"type": "array", "items": self.values.schema(), "maxItems": self.limit}
        return {"anyOf": [self.values.schema(), array]} if self.single else array

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` with the length of a list that is too long, or the name of the first wrong item."""
        self._check_length(name, value)
        if self.fits(value):
            return
        for index, item in enumerate(value if isinstance(value, list | tuple) else ()):
            self.values.check(f"{name}[{index}]", item)
        Values.check(self, name, value)

    def convert(self, name: str, value: Any) -> Any:
        if not self.values.converts or not isinstance(value, list | tuple):
            self.check(name, value)
            return value
        self._check_length(name, value)
        return tuple(self.values.convert(f"{name}[{index}]", item) for index, item in enumerate(value))

    def _check_length(self, name: str, value: object) -> None:
        if isinstance(value, list | tuple) and len(value) > self.limit:
            raise ConfigError(f"{name} holds {len(value)} items; it must be {self.words}")
        if self._has_too_many_values(value):
            raise ConfigError(f"{name} holds more than {self.total_limit} values altogether; it must be {self.words}")

    def _has_too_many_values(self, value: object) -> bool:
        return self.total_limit is not None and count_values(value, self.total_limit) > self.total_limit


@dataclass(frozen=True, slots=True)
class AnyOf(Values):
    """Values of any of several sets. The last set has objects, and checks those."""

    sets: tuple[Values, ...]

    @property
    def words(self) -> str:
        return ", or ".join(values.words for values in self.sets)

    def fits(self, value: object) -> bool:
        return any(values.fits(value) for values in self.sets)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [values.schema() for values in self.sets]}

    def check(self, name: str, value: object) -> None:
        if isinstance(value, Mapping):
            self.sets[-1].check(name, value)
        else:
            Values.check(self, name, value)


@dataclass(frozen=True, slots=True)
class Biases(Values):
    """Objects of at most `limit` token ids, which may be texts, with numbers from -`size` to `size`."""

    converts = True

    limit: int
    size: float

    @property
    def words(self) -> str:
        return f"an object of at most {self.limit} token ids, each with a number from -{self.size:g} to {self.size:g}"

    def fits(self, value: object) -> bool:
        if not isinstance(value, Mapping) or len(value) > self.limit:
            return False
        ids = [_token_id(key) for key in value]
        return None not in ids and len(set(ids)) == len(ids) and all(self._fits(number) for number in value.values())

    def schema(self) -> dict[str, Any]:
        number = {"type": "number", "minimum": -self.size, "maximum": self.size}
        names = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,7})$"}
        return {
            "type": "object",
            "maxProperties": self.limit,
            "propertyNames": names,
            "additionalProperties": number,
            "description": self.words,
        }

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` with the first entry that is not allowed."""
        if isinstance(value, Mapping) and len(value) <= self.limit:
            for key, number in value.items():
                if _token_id(key) is not None and not self._fits(number):
                    raise ConfigError(
                        f"{name}[{key}] must be a number from -{self.size:g} to {self.size:g}, got {shown(number)}"
                    )
        Values.check(self, name, value)

    def convert(self, name: str, value: Any) -> Any:
        self.check(name, value)
        return {_token_id(key): float(number) for key, number in value.items()}

    def _fits(self, number: object) -> bool:
        return is_real(number, -self.size, self.size)


def _token_id(key: object) -> int | None:
    """The token id that a `key` of an object spells. Returns None if it spells none."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 8 and str(int(key)) == key:
        return int(key)
    return key if is_whole(key, 0, POSITIONS) else None


@dataclass(frozen=True, slots=True)
class Settings(Values):
    """Objects of at most `limit` keys, which are checked where they are used; `noun` is used in `words`.

    Keys and values, with all that they contain, have at most about `chars` characters as JSON. They are counted before
    anything else is done.
    """

    noun: str
    limit: int
    chars: int = OBJECT

    @property
    def words(self) -> str:
        return f"an object of at most {self.limit} {self.noun} and {self.chars} characters"

    def fits(self, value: object) -> bool:
        if (
            not isinstance(value, Mapping)
            or len(value) > self.limit
            or count_values(value, self.chars, texts=True) > self.chars
        ):
            return False
        return all(isinstance(key, str) for key in value)

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "maxProperties": self.limit, "description": self.words}


@dataclass(frozen=True, slots=True)
class TextsByName(Values):
    """Objects of texts by name; `noun` is used in `words`."""

    noun: str

    @property
    def words(self) -> str:
        return f"an object of {self.noun}"

    def fits(self, value: object) -> bool:
        return isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "string"}}


def count_values(value: object, limit: int, *, texts: bool = False) -> int:
    """The number of values in a JSON-like value, including itself; with `texts`, characters are counted as well.

    Counting ends, with a result above `limit`, once there are more than `limit`.
    """
    count, stack = 0, [value]
    while stack and count <= limit:
        item = stack.pop()
        count += 1 + (len(item) if texts and isinstance(item, str) else 0)
        if isinstance(item, Mapping | list | tuple):
            if count + len(stack) + len(item) > limit:
                return limit + 1
            if isinstance(item, Mapping):
                count += sum(len(key) for key in item if isinstance(key, str)) if texts else 0
                stack.extend(item.values())
            else:
                stack.extend(item)
    return count


def is_whole(value: object, low: int, high: int = LARGEST) -> TypeGuard[int]:
    """Whether `value` is an `int` other than a `bool`, from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_real(value: object, low: float, high: float = math.inf) -> TypeGuard[float]:
    """Whether `value` is a finite number from `low` to `high` that a float can hold, and no `bool`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return False
    # Whole numbers from JSON may exceed what a float can hold.
    return abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value)


def check_whole(name: str, value: object, low: int, high: int = LARGEST, *, optional: bool = False) -> None:
    """Raise `ConfigError` if `value` is not a whole number from `low` to `high`; `optional` allows None."""
    values = Whole(low, high)
    (OrNull(values) if optional else values).check(name, value)


def check_real(
    name: str, value: object, low: float, high: float = math.inf, *, above: bool = False, optional: bool = False
) -> None:
    """Raise `ConfigError` if `value` is not a number from `low` to `high`.

    With `above`, `low` itself is refused as well; `optional` allows None.
    """
    values = Real(low, high, above)
    (OrNull(values) if optional else values).check(name, value)


def check_choice(name: str, value: object, names: Iterable[str]) -> None:
    """Raise `UnknownNameError` if `value` is none of `names`."""
    Choice(tuple(names)).check(name, value)


def check_list(name: str, value: object, noun: str) -> Sequence[Any]:
    """Return `value`. Raises `ConfigError` if it is not a list or tuple; `noun` names the items in the error."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list of {noun}, got {shown(value)}")
    return value


def json_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises `ConfigError` if there is none; `name` names it in the error."""
    return _parse(name, text, dict, "object")


def json_list(name: str, text: str) -> list[Any]:
    """The JSON list in `text`. Raises `ConfigError` if there is none; `name` names it in the error."""
    return _parse(name, text, list, "list")


def _parse(name: str, text: str, json_type: type[T], noun: str) -> T:
    try:
        value = parse_json(text)
    except ValueError as error:  # also for numbers of too many digits
        raise ConfigError(f"{name} is not JSON that can be read: {error}") from error
    if not isinstance(value, json_type):
        raise ConfigError(f"{name} must be a JSON {noun}, got {type(value).__name__}")
    return value


def parse_json(text: str, *, finite: bool = False) -> Any:
    """The value of a JSON text.

    Raises `ValueError` if it is invalid, has numbers of too many digits, or nests values more than `MAX_DEPTH` deep, so
    that recursion over a value is safe; with `finite` also for numbers that no float can hold, and for `NaN`.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep; send flatter ones")
    return json.loads(text, parse_float=_finite, parse_constant=_finite) if finite else json.loads(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:SHOWN]} is not a finite number")
    return number


def _depth(text: str) -> int:
    """The largest number of open brackets in a JSON text. Counting ends beyond `MAX_DEPTH`."""
    depth = deepest = 0
    for match in _MARK.finditer(text):
        mark = text[match.start()]
        if mark != '"':
            depth += 1 if mark in "[{" else -1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
    return deepest


def shown(value: object) -> str:
    """The beginning of the `repr` of a refused value, for an error. The rest of the value is not visited."""
    text = ""
    for part in _repr_parts(value):
        text += part
        if len(text) > SHOWN:
            return text[:SHOWN] + "..."
    return text


def _repr_parts(value: object) -> Iterator[str]:
    """The `repr` of a value in parts. Each level begins with a part, so that `SHOWN` bounds the depth."""
    if isinstance(value, str | bytes):
        yield repr(value[: SHOWN + 1])
    elif isinstance(value, list | tuple | dict):
        opening, closing = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
        yield opening
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _repr_parts(item)
            if isinstance(value, dict):
                yield ": "
                yield from _repr_parts(value[item])
        yield ",)" if isinstance(value, tuple) and len(value) == 1 else closing
    elif isinstance(value, int) and abs(value) > LARGEST**8:
        yield f"{value:#x}"  # Python writes no decimal number of thousands of digits
    else:
        yield repr(value)


def _bound(value: int) -> str:
    return {LARGEST: "2**63 - 1", -LARGEST: "-(2**63 - 1)"}.get(value, str(value))
