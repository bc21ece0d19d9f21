"""Regular expressions of what JSON Schema says of numbers and strings: ranges, patterns and formats.

Each matches nothing that its keyword forbids. Where the whole set is no small expression it matches a part of it: a
string of a pattern has no escapes but those that the pattern spells, and February has 28 days.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from remask.checks.values import shown
from remask.errors import ConfigError

_PLAIN = r"[^\"\\\x00-\x1F\x7F-\x9F]"  # characters that stand in a JSON string as they are
_DOT = r"[^\"\\\x00-\x1F\x7F-\x9F\x{2028}\x{2029}]"  # those of them that end no line
_DIGITS = 18  # of a bound of whole numbers
_PRECISION = 15  # digits that two decimals need not differ beyond to be two floats, so that none is read as its bound

_HEX = "[0-9a-f]"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE = (
    r"[1-9][0-9]{3}-"
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[a-z0-9]{1,20}(\.[a-z0-9]{1,20}){0,2}@[a-z0-9]{1,20}(\.[a-z]{2,8}){1,2}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"{_HEX}{{1,4}}(:{_HEX}{{1,4}}){{7}}",
    "time": _TIME,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""The formats of strings that are understood."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def text_part(node: Mapping[str, Any]) -> str | None:
    """The expression of the JSON strings of a pattern or a format; None where a schema has neither.

    Raises `ConfigError` where it cannot be guaranteed.
    """
    strings = [name for name in ("pattern", "format") if name in node]
    beside = sorted({*strings, *(name for name in ("minLength", "maxLength") if name in node)})
    if not strings:
        return None
    if len(beside) > 1:
        raise ConfigError(f"{' and '.join(beside)} are not guaranteed together; keep one of them")
    if "format" in node:
        name = node["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise ConfigError(f"format {shown(name)} cannot be guaranteed; understood: {', '.join(FORMATS)}")
        return f'"{FORMATS[name]}"'
    return f'"{string_pattern(node["pattern"])}"'


def bounded(node: Mapping[str, Any], *, whole: bool) -> str | None:
    """The expression of the numbers within the bounds of a schema; None where they leave none.

    Raises `ConfigError` where it cannot be guaranteed.
    """
    limits: dict[str, float | int] = {}
    digits = _DIGITS if whole else _PRECISION - 1
    for name in BOUNDS:
        value = node.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{name} must be a number, got {shown(value)}")
        if abs(value) >= 10**digits:
            raise ConfigError(f"{name} has more than {digits} digits, and at most so many are guaranteed")
        limits[name] = value
    if whole:
        lows = [math.ceil(limits["minimum"])] if "minimum" in limits else []
        lows += [math.floor(limits["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in limits else []
        highs = [math.floor(limits["maximum"])] if "maximum" in limits else []
        highs += [math.ceil(limits["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in limits else []
        return integers(max(lows, default=None), min(highs, default=None))
    for name, value in limits.items():
        if value != int(value):
            raise ConfigError(f"{name} of a 'number' is guaranteed where it is whole, got {value!r}")
    low, open_low = _tighter(limits, "minimum", "exclusiveMinimum", 1)
    high, open_high = _tighter(limits, "maximum", "exclusiveMaximum", -1)
    return numbers(low, high, open_low, open_high)


def _tighter(limits: Mapping[str, float], closed: str, opened: str, sign: int) -> tuple[int | None, bool]:
    """The bound that binds, and whether it is left out itself."""
    bounds = [(sign * int(limits[name]), name == opened) for name in (closed, opened) if name in limits]
    if not bounds:
        return None, False
    value, is_open = max(bounds)
    return sign * value, is_open


def integers(low: int | None, high: int | None) -> str | None:
    """Whole numbers from `low` to `high` in JSON's form; None of a bound leaves it out. None where there are none."""
    if low is not None and high is not None and low > high:
        return None
    parts = []
    if low is None or low < 0:  # those below 0, by their size
        parts += [
            f"-{each}" for each in _sizes(1 if high is None or high >= 0 else -high, None if low is None else -low)
        ]
    if high is None or high >= 0:
        parts += _sizes(max(low or 0, 0) if low is not None else 0, high)
    return f"({'|'.join(parts)})"


def numbers(low: int | None, high: int | None, open_low: bool, open_high: bool) -> str | None:
    """Decimal numbers between whole bounds, without exponents; an open bound is left out itself."""
    if low is not None and high is not None and (low > high or (low == high and (open_low or open_high))):
        return None
    parts = []
    if low is None or low < 0:
        above = 0 if high is None or high > 0 else -high
        # 0 itself, which has no sign here, is among those that follow.
        parts += [
            f"-{each}" for each in _decimals(above, None if low is None else -low, open_high or above == 0, open_low)
        ]
    if high is None or high >= 0:
        below = low is not None and low >= 0
        parts += _decimals(max(low or 0, 0), high, below and open_low, open_high)
    return f"({'|'.join(parts)})" if parts else None


def _decimals(low: int, high: int | None, open_low: bool, open_high: bool) -> Iterator[str]:
    """Expressions of decimals from `low` to `high`, both 0 or more."""
    # Beyond so many places a decimal may be read as the bound next to it.
    places = _PRECISION - len(str(low if high is None else high))
    if high is None or low < high:
        if open_low:
            yield rf"{low}\.[0-9]{{0,{places - 1}}}[1-9]"  # a fraction that is not 0
            rest = low + 1
        else:
            rest = low
        if high is None or rest < high:
            wholes = _sizes(rest, None if high is None else high - 1)
            yield rf"({'|'.join(wholes)})(\.[0-9]{{1,{places}}})?"
    if high is not None and not open_high and not (open_low and low == high):
        yield rf"{high}(\.0{{1,{places}}})?"


def _sizes(low: int, high: int | None) -> list[str]:
    """Expressions of whole numbers from `low` to `high`, both 0 or more, without leading zeros."""
    found: list[str] = []
    if low == 0:
        found.append("0")
        low = 1
    if high is not None and high < low:
        return found
    top = high if high is not None else 10 ** len(str(low)) - 1
    for length in range(len(str(low)), len(str(top)) + 1):
        first, last = max(low, 10 ** (length - 1)), min(top, 10**length - 1)
        found += _same_length(str(first), str(last))
    if high is None:
        found.append(f"[1-9][0-9]{{{len(str(low))},}}")
    return found


def _same_length(first: str, last: str) -> Iterator[str]:
    """Expressions of the numbers from `first` to `last`, which have as many digits."""
    rest = len(first) - 1
    if first == "0" * (rest + 1) and last == "9" * (rest + 1):
        yield f"[0-9]{{{rest + 1}}}"
    elif not rest:
        yield f"[{first}-{last}]"
    elif first[0] == last[0]:
        yield from (first[0] + each for each in _same_length(first[1:], last[1:]))
    else:
        start, stop = int(first[0]), int(last[0])
        if first[1:] != "0" * rest:
            yield from (first[0] + each for each in _same_length(first[1:], "9" * rest))
            start += 1
        if last[1:] != "9" * rest:
            yield from (last[0] + each for each in _same_length("0" * rest, last[1:]))
            stop -= 1
        if start <= stop:
            yield f"[{start}-{stop}][0-9]{{{rest}}}"


_PIECE = re.compile(
    r"""(?P<escape>\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[A-Za-z_=]+\}|.))
      | (?P<set>\[\^?(?:\\.|[^\]\\])*\])
      | (?P<open>\((?:\?:)?(?!\?))
      | (?P<count>[*+?]\??|\{[0-9]+(?:,[0-9]*)?\}\??)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
# ECMA 262, which JSON Schema refers to, and Python differ in what a class holds. A character is let through where both
# let it through: one of the narrow class, or none of the wide one.
_SPACES = r"\t\n\x0B\f\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_NARROW = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}
_WIDE = {"d": r"\p{Nd}", "w": r"\w\p{N}", "s": rf"{_SPACES}\x{{FEFF}}"}
_IN_SET = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[A-Za-z_=]+\}|.)|.", re.DOTALL)
_SPELLED = {"n": r"\\n", "t": r"\\t", "r": r"\\r", "f": r"\\f"}  # as JSON writes them


def string_pattern(pattern: object) -> str:
    """The expression of JSON strings, without their quotes, in which a `pattern` is found.

    Raises `ConfigError` where it goes beyond regular languages, or has an anchor in its middle.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"pattern must be a text, got {pattern!r}")
    ways: list[list[str]] = [[]]
    depth = 0
    for piece in _PIECE.finditer(pattern):
        kind, text = str(piece.lastgroup), piece.group()
        depth += (kind == "open") - (text == ")" and kind == "other")
        if depth < 0:
            raise _beyond(pattern, "brackets that do not open")
        if kind == "count" and not ways[-1]:
            raise _beyond(pattern, f"{text} with nothing to repeat")
        if text == "|" and kind == "other" and depth == 0:
            ways.append([])
        elif text == "^" and kind == "other":
            if depth or ways[-1]:
                raise _beyond(pattern, "^ within it")
            ways[-1].append("^")
        else:
            if ways[-1] and ways[-1][-1] == "$":
                raise _beyond(pattern, "$ within it")
            ways[-1].append(_translated(pattern, kind, text, depth))
    if depth:
        raise _beyond(pattern, "brackets that do not close")
    found = []
    for way in ways:
        begins, ends = way[:1] == ["^"], way[-1:] == ["$"]
        inner = "".join(each for each in way if each not in ("^", "$"))
        found.append(f"{'' if begins else f'{_PLAIN}*'}{inner}{'' if ends else f'{_PLAIN}*'}")
    return f"({'|'.join(found)})"


_REGEX_PIECE = re.compile(
    r"\\(?:[xuU]\{[^}]*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[a-zA-Z-]+\)|\((?:\?(?:[a-zA-Z-]*:|P?<\w+>))?|.", re.DOTALL
)
_BEGINS, _ENDS = frozenset(["^", r"\A"]), frozenset(["$", r"\z", r"\Z"])


def whole_regex(regex: str) -> str:
    """A regular expression that an answer matches as a whole, without anchors and with `pattern`'s `\\d`, `\\w`, `\\s`.

    Raises `ConfigError` where an anchor stands anywhere but at an end, where it has a meaning of its own.
    """
    pieces = _without_anchors(regex, _REGEX_PIECE.findall(regex), _BEGINS, "(", ")")
    pieces = _without_anchors(regex, pieces[::-1], _ENDS, ")", "(")[::-1]
    return "".join(map(_ascii, pieces))


def _without_anchors(regex: str, pieces: list[str], anchors: frozenset[str], opens: str, closes: str) -> list[str]:
    """`pieces`, in the order in which they are come upon from one end, without the `anchors` of that end."""
    found: list[str] = []
    at_end = True  # nothing but anchors and brackets that open stands before
    groups = list[tuple[bool, int]]()  # of each open group whether it begins at the end, and the anchors before it
    dropped = 0
    for place, piece in enumerate(pieces):
        if piece in anchors:
            if not at_end:
                raise ConfigError(
                    f"structured_outputs.regex {regex[:60]!r} has {piece} within it, and the whole answer matches: an "
                    "anchor stands at its beginning or its end; write it without"
                )
            dropped += 1
            continue
        found.append(piece)
        if piece[0] == opens and not piece.endswith(")" if opens == "(" else "("):
            groups.append((at_end, dropped))
        elif piece[0] == closes and groups:
            began, before = groups.pop()
            repeated = pieces[place + 1 : place + 2] if opens == "(" else []
            if dropped > before and began and repeated and repeated[0] in ("*", "+", "{"):
                raise ConfigError(
                    f"structured_outputs.regex {regex[:60]!r} repeats a group that holds an anchor; write it without"
                )
            at_end = False
        elif piece == "|":
            at_end = groups[-1][0] if groups else True
        elif not re.fullmatch(r"\(\?[a-zA-Z-]+\)", piece):
            at_end = False
    return found


def _ascii(piece: str) -> str:
    """A piece of a regular expression whose classes are those of `pattern`."""
    if piece[0] == "\\" and piece[1:].lower() in _NARROW:
        held = _class(piece[1:])
        return held if held.startswith("[") else f"[{held}]"
    if piece[0] == "[" and len(piece) > 1:
        negated = piece.startswith("[^")
        return re.sub(
            r"\\(.)",
            lambda found: _class(found[1], negated=negated) if found[1].lower() in _NARROW else found[0],
            piece,
            flags=re.DOTALL,
        )
    return piece


def _translated(pattern: str, kind: str, text: str, depth: int) -> str:
    """One piece of a pattern, over the characters of a JSON string."""
    if kind == "open":
        return "("
    if kind == "count":
        return text.removesuffix("?") if len(text) > 1 else text
    if kind == "set":
        return f"[{_set(pattern, text)}&&{_PLAIN}]"
    if kind == "other":
        if text == "$" and depth:
            raise _beyond(pattern, "$ within it")
        if text == ".":
            return _DOT
        if text in "(?":
            raise _beyond(pattern, "a group that looks ahead or behind, or has a name")
        return _character(pattern, text) if text not in "$|)" else text
    name = text[1:]
    if (name[0] in "pP" and len(name) > 1) or name.lower() in _NARROW:
        return f"[[{_class(name) if name.lower() in _NARROW else text}]&&{_PLAIN}]"
    if name in _SPELLED:
        return f"({_SPELLED[name]})"
    if name[0] in "ux" and len(name) > 1:
        return _character(pattern, chr(int(name[1:], 16)))
    if name.isalnum():
        raise _beyond(pattern, f"\\{name}")
    return _character(pattern, name)


def _class(name: str, *, negated: bool = False) -> str:
    """What a set holds for `\\d` and the like; `negated` says that the characters outside of the set are meant."""
    held = (_NARROW if name.islower() != negated else _WIDE)[name.lower()]
    return held if name.islower() else f"[^{held}]"


def _set(pattern: str, text: str) -> str:
    """A set of characters, in the syntax of the crate that reads it, where sets stand within sets."""
    negated = text.startswith("[^")
    found: list[str] = []
    pieces = _IN_SET.findall(text[1 + negated : -1])
    classes = [piece[1:].lower() in _NARROW or (piece[:2] in (r"\p", r"\P") and len(piece) > 2) for piece in pieces]
    begins = False  # whether the piece before may be the first character of a range
    for place, piece in enumerate(pieces):
        name = piece[1:]
        within = piece == "-" and begins and classes[place + 1 : place + 2] == [False]
        begins = not (within or classes[place] or found[-1:] == ["-"])
        if within:
            found.append(piece)
        elif not name:
            found.append(piece if piece.isalnum() or not piece.isascii() else rf"\x{{{ord(piece):X}}}")
        elif name.lower() in _NARROW:
            found.append(_class(name, negated=negated))
        elif name[0] in "ux" and len(name) > 1:
            found.append(rf"\x{{{name[1:]}}}")
        elif name in _SPELLED or (name[0] in "pP" and len(name) > 1):
            found.append(piece)
        elif name.isalnum():
            raise _beyond(pattern, f"\\{name} in a set")
        else:
            found.append(rf"\x{{{ord(name):X}}}")
    if not found:
        raise _beyond(pattern, "an empty set")
    return f"[{'^' if negated else ''}{''.join(found)}]"


def _character(pattern: str, char: str) -> str:
    """A character as a JSON string spells it."""
    if char in '"\\':
        return r"(\\\\)" if char == "\\" else r'(\\")'
    if not char.isprintable():
        raise _beyond(pattern, f"the character {char!r}")
    return char if char.isalnum() or not char.isascii() or char == " " else f"\\{char}"


def _beyond(pattern: str, what: str) -> ConfigError:
    return ConfigError(f"pattern {pattern[:60]!r} has {what}, which cannot be guaranteed; write it without")
