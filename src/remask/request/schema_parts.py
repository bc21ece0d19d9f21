"""Regular expressions for JSON Schema's keywords of numbers and strings: ranges, patterns and formats.

Each matches nothing that its keyword forbids. If all allowed values would be too large an expression, it matches a
part of them: a string of a pattern has only the escapes that the pattern spells, and February has 28 days.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from remask.checks.values import shown
from remask.errors import ConfigError

_JSON_CHARACTER = r"[^\"\\\x00-\x1F\x7F-\x9F]"  # characters that need no escape in a JSON string
_DOT = r"[^\"\\\x00-\x1F\x7F-\x9F\x{2028}\x{2029}]"  # all but the line separators among them
_DIGITS = 18  # of a bound of whole numbers
_PRECISION = 15  # significant digits; decimals that differ within these are different floats

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


def string_expression(node: Mapping[str, Any]) -> str | None:
    """Return the expression of the JSON strings of a pattern or a format. Returns None if a schema has neither.

    Raises `ConfigError` if it cannot be guaranteed.
    """
    if "pattern" not in node and "format" not in node:
        return None
    names = sorted({"pattern", "format", "minLength", "maxLength"} & node.keys())
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} are not guaranteed together; keep one of them")
    if "format" in node:
        name = node["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise ConfigError(f"format {shown(name)} cannot be guaranteed; understood: {', '.join(FORMATS)}")
        return f'"{FORMATS[name]}"'
    return f'"{string_pattern(node["pattern"])}"'


def number_expression(node: Mapping[str, Any], *, whole: bool) -> str | None:
    """Return the expression of the numbers within the bounds of a schema. Returns None if there are none.

    Raises `ConfigError` if it cannot be guaranteed.
    """
    limits = _read_bounds(node, _DIGITS if whole else _PRECISION - 1)
    if whole:
        lows = [math.ceil(limits["minimum"])] if "minimum" in limits else []
        lows += [math.floor(limits["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in limits else []
        highs = [math.floor(limits["maximum"])] if "maximum" in limits else []
        highs += [math.ceil(limits["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in limits else []
        return integer_range(max(lows, default=None), min(highs, default=None))
    for name, value in limits.items():
        if value != int(value):
            raise ConfigError(f"{name} of a 'number' is guaranteed where it is whole, got {value!r}")
    low, open_low = _effective_bound(limits, "minimum", "exclusiveMinimum", 1)
    high, open_high = _effective_bound(limits, "maximum", "exclusiveMaximum", -1)
    return decimal_range(low, high, open_low=open_low, open_high=open_high)


def _read_bounds(node: Mapping[str, Any], max_digits: int) -> dict[str, float]:
    """Return the bounds of a schema by keyword. Raises `ConfigError` on values that are no numbers or too large."""
    limits: dict[str, float] = {}
    for name in BOUNDS:
        value = node.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not _is_finite(value):
            raise ConfigError(f"{name} must be a number, got {shown(value)}")
        if abs(value) >= 10**max_digits:
            raise ConfigError(f"{name} has more than {max_digits} digits, and at most so many are guaranteed")
        limits[name] = value
    return limits


def _is_finite(value: object) -> TypeGuard[float]:
    """Whether `value` is a number, and no infinity; a whole number may have more digits than a float can hold."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _effective_bound(limits: Mapping[str, float], inclusive: str, exclusive: str, sign: int) -> tuple[int | None, bool]:
    """Return the tighter of two bounds, and whether it is exclusive. `sign` is 1 for lower bounds and -1 for upper."""
    bounds = [(sign * int(limits[name]), name == exclusive) for name in (inclusive, exclusive) if name in limits]
    if not bounds:
        return None, False
    value, is_open = max(bounds)
    return sign * value, is_open


def integer_range(low: int | None, high: int | None) -> str | None:
    """Return the expression of JSON's whole numbers from `low` to `high`; a bound of None is no bound.

    Returns None if there are no such numbers.
    """
    if low is not None and high is not None and low > high:
        return None
    parts = []
    if low is None or low < 0:  # negative numbers, by their absolute values
        smallest = 1 if high is None or high >= 0 else -high
        parts += [f"-{number}" for number in _natural_numbers(smallest, None if low is None else -low)]
    if high is None or high >= 0:
        parts += _natural_numbers(max(low or 0, 0), high)
    return f"({'|'.join(parts)})"


def decimal_range(low: int | None, high: int | None, *, open_low: bool, open_high: bool) -> str | None:
    """Return the expression of decimal numbers between whole bounds, without exponents. Open bounds are exclusive.

    A bound of None is no bound. Returns None if there are no such numbers.
    """
    if low is not None and high is not None and (low > high or (low == high and (open_low or open_high))):
        return None
    parts = []
    if low is None or low < 0:
        smallest = 0 if high is None or high > 0 else -high
        largest = None if low is None else -low
        # 0 is written without a sign, below.
        excludes_smallest = open_high or smallest == 0
        negatives = _decimals(smallest, largest, open_low=excludes_smallest, open_high=open_low)
        parts += [f"-{number}" for number in negatives]
    if high is None or high >= 0:
        excludes_low = open_low and low is not None and low >= 0
        parts += _decimals(max(low or 0, 0), high, open_low=excludes_low, open_high=open_high)
    return f"({'|'.join(parts)})" if parts else None


def _decimals(low: int, high: int | None, *, open_low: bool, open_high: bool) -> Iterator[str]:
    """Yield expressions of decimals from `low` to `high`, both 0 or more. Open bounds are exclusive."""
    # With more places a decimal may be read as the bound next to it.
    places = _PRECISION - len(str(low if high is None else high))
    if high is None or low < high:
        if open_low:
            yield rf"{low}\.[0-9]{{0,{places - 1}}}[1-9]"  # a fraction that is not 0
            first_whole = low + 1
        else:
            first_whole = low
        if high is None or first_whole < high:
            wholes = _natural_numbers(first_whole, None if high is None else high - 1)
            yield rf"({'|'.join(wholes)})(\.[0-9]{{1,{places}}})?"
    if high is not None and not open_high and not (open_low and low == high):
        yield rf"{high}(\.0{{1,{places}}})?"


def _natural_numbers(low: int, high: int | None) -> list[str]:
    """Return expressions of whole numbers from `low` to `high`, both 0 or more, without leading zeros."""
    expressions: list[str] = []
    if low == 0:
        expressions.append("0")
        low = 1
    if high is not None and high < low:
        return expressions
    top = high if high is not None else 10 ** len(str(low)) - 1
    for length in range(len(str(low)), len(str(top)) + 1):
        first, last = max(low, 10 ** (length - 1)), min(top, 10**length - 1)
        expressions += _digit_ranges(str(first), str(last))
    if high is None:
        expressions.append(f"[1-9][0-9]{{{len(str(low))},}}")
    return expressions


def _digit_ranges(first: str, last: str) -> Iterator[str]:
    """Yield expressions of the numbers from `first` to `last`, which have equally many digits."""
    tail_length = len(first) - 1
    if first == "0" * (tail_length + 1) and last == "9" * (tail_length + 1):
        yield f"[0-9]{{{tail_length + 1}}}"
    elif not tail_length:
        yield f"[{first}-{last}]"
    elif first[0] == last[0]:
        yield from (first[0] + tail for tail in _digit_ranges(first[1:], last[1:]))
    else:
        start, stop = int(first[0]), int(last[0])
        if first[1:] != "0" * tail_length:
            yield from (first[0] + tail for tail in _digit_ranges(first[1:], "9" * tail_length))
            start += 1
        if last[1:] != "9" * tail_length:
            yield from (last[0] + tail for tail in _digit_ranges("0" * tail_length, last[1:]))
            stop -= 1
        if start <= stop:
            yield f"[{start}-{stop}][0-9]{{{tail_length}}}"


_PIECE = re.compile(
    r"""(?P<escape>\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[A-Za-z_=]+\}|.))
      | (?P<set>\[\^?(?:\\.|[^\]\\])*\])
      | (?P<open>\((?:\?:)?(?!\?))
      | (?P<count>[*+?]\??|\{[0-9]+(?:,[0-9]*)?\}\??)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
# ECMA 262, which JSON Schema refers to, and Python differ in what a class such as \d holds. An expression allows what
# both allow: the narrow class for \d, and all but the wide class for \D.
_SPACES = r"\t\n\x0B\f\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_NARROW = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}
_WIDE = {"d": r"\p{Nd}", "w": r"\w\p{N}", "s": rf"{_SPACES}\x{{FEFF}}"}
_SET_PIECE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[A-Za-z_=]+\}|.)|.", re.DOTALL)
_JSON_ESCAPES = {"n": r"\\n", "t": r"\\t", "r": r"\\r", "f": r"\\f"}  # as JSON writes them


def string_pattern(pattern: object) -> str:
    """Return the expression of JSON strings, without their quotes, that contain a match of `pattern`.

    Raises `ConfigError` if the pattern is no regular language, or has an anchor that is not at an end.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"pattern must be a text, got {pattern!r}")
    branches: list[list[str]] = [[]]
    depth = 0
    for piece in _PIECE.finditer(pattern):
        group = str(piece.lastgroup)
        text = piece.group()
        depth += (group == "open") - (text == ")" and group == "other")
        if depth < 0:
            raise _unsupported_error(pattern, "brackets that do not open")
        if group == "count" and not branches[-1]:
            raise _unsupported_error(pattern, f"{text} with nothing to repeat")
        if text == "|" and group == "other" and depth == 0:
            branches.append([])
        elif text == "^" and group == "other":
            if depth or branches[-1]:
                raise _unsupported_error(pattern, "^ within it")
            branches[-1].append("^")
        else:
            if branches[-1] and branches[-1][-1] == "$":
                raise _unsupported_error(pattern, "$ within it")
            branches[-1].append(_translate_piece(pattern, group, text, depth))
    if depth:
        raise _unsupported_error(pattern, "brackets that do not close")
    expressions = []
    for branch in branches:
        has_start, has_end = branch[:1] == ["^"], branch[-1:] == ["$"]
        content = "".join(piece for piece in branch if piece not in ("^", "$"))
        expressions.append(
            f"{'' if has_start else f'{_JSON_CHARACTER}*'}{content}{'' if has_end else f'{_JSON_CHARACTER}*'}"
        )
    return f"({'|'.join(expressions)})"


_REGEX_PIECE = re.compile(
    r"\\(?:[xuU]\{[^}]*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[a-zA-Z-]+\)|\((?:\?(?:[a-zA-Z-]*:|P?<\w+>))?|.", re.DOTALL
)
_INLINE_FLAGS = re.compile(r"\(\?[a-zA-Z-]+\)")
_START_ANCHORS, _END_ANCHORS = frozenset(["^", r"\A"]), frozenset(["$", r"\z", r"\Z"])


def whole_regex(regex: str) -> str:
    """Return a regular expression that an answer matches as a whole, without the anchors at its ends.

    Its classes `\\d`, `\\w` and `\\s` become those of `pattern`. Raises `ConfigError` if an anchor is not at an end.
    """
    pieces = _strip_anchors(regex, _REGEX_PIECE.findall(regex), _START_ANCHORS, backwards=False)
    pieces = _strip_anchors(regex, pieces[::-1], _END_ANCHORS, backwards=True)[::-1]
    return "".join(map(_narrow_classes, pieces))


def _strip_anchors(regex: str, pieces: list[str], anchors: frozenset[str], *, backwards: bool) -> list[str]:
    """Return the `pieces` of `regex` without the `anchors` of one end, from which the pieces are read.

    Read `backwards`, the pieces begin with the last one. Raises `ConfigError` on an anchor that is not at the end, or
    that is repeated, alone or in its group.
    """
    opening, closing = ")(" if backwards else "()"
    result: list[str] = []
    at_end = True  # only anchors and opening brackets precede this piece
    groups: list[tuple[bool, int]] = []  # for each open group, whether it begins at the end, and the anchors before it
    anchor_count = 0
    for index, piece in enumerate(pieces):
        # Backwards, a quantifier comes first, so that what it repeats is not at the end.
        following = "" if backwards else "".join(pieces[index + 1 : index + 2])
        if piece in anchors:
            if not at_end:
                raise ConfigError(
                    f"structured_outputs.regex {regex[:60]!r} has {piece} within it, and the whole answer matches: an "
                    "anchor stands at its beginning or its end; write it without"
                )
            if following in ("*", "+", "?", "{"):
                raise ConfigError(
                    f"structured_outputs.regex {regex[:60]!r} repeats the anchor {piece}; write it without"
                )
            anchor_count += 1
            continue
        result.append(piece)
        if _INLINE_FLAGS.fullmatch(piece):
            continue  # no group
        if piece[0] == opening:
            groups.append((at_end, anchor_count))
        elif piece[0] == closing and groups:
            group_at_end, count_before = groups.pop()
            if anchor_count > count_before and group_at_end and following in ("*", "+", "{"):
                raise ConfigError(
                    f"structured_outputs.regex {regex[:60]!r} repeats a group that holds an anchor; write it without"
                )
            at_end = False
        elif piece == "|":
            at_end = groups[-1][0] if groups else True
        else:
            at_end = False
    return result


def _narrow_classes(piece: str) -> str:
    """Return a piece of a regular expression with its classes replaced by those of `pattern`."""
    if piece[0] == "\\" and piece[1:].lower() in _NARROW:
        content = _class_content(piece[1:])
        return content if content.startswith("[") else f"[{content}]"
    if piece[0] == "[" and len(piece) > 1:
        negated = piece.startswith("[^")
        return re.sub(
            r"\\(.)",
            lambda match: _class_content(match[1], negated=negated) if match[1].lower() in _NARROW else match[0],
            piece,
            flags=re.DOTALL,
        )
    return piece


def _translate_piece(pattern: str, group: str, text: str, depth: int) -> str:
    """Translate a piece of a pattern, a `group` of `_PIECE`, to an expression over the characters of a JSON string."""
    if group == "open":
        return "("
    if group == "count":
        return text.removesuffix("?") if len(text) > 1 else text
    if group == "set":
        return f"[{_set_expression(pattern, text)}&&{_JSON_CHARACTER}]"
    if group == "other":
        if text == "$" and depth:
            raise _unsupported_error(pattern, "$ within it")
        if text == ".":
            return _DOT
        if text in "(?":
            raise _unsupported_error(pattern, "a group that looks ahead or behind, or has a name")
        return _character_expression(pattern, text) if text not in "$|)" else text
    name = text[1:]  # of an escape
    if (name[0] in "pP" and len(name) > 1) or name.lower() in _NARROW:
        return f"[[{_class_content(name) if name.lower() in _NARROW else text}]&&{_JSON_CHARACTER}]"
    if name in _JSON_ESCAPES:
        return f"({_JSON_ESCAPES[name]})"
    if name[0] in "ux" and len(name) > 1:
        return _character_expression(pattern, chr(int(name[1:], 16)))
    if name.isalnum():
        raise _unsupported_error(pattern, f"\\{name}")
    return _character_expression(pattern, name)


def _class_content(name: str, *, negated: bool = False) -> str:
    """Return the content of a set for a class such as `\\d`; `negated` if the set itself is negated."""
    characters = (_NARROW if name.islower() != negated else _WIDE)[name.lower()]
    return characters if name.islower() else f"[^{characters}]"


def _set_expression(pattern: str, text: str) -> str:
    """Translate a set of characters to the syntax of the Rust crate that compiles expressions, which nests sets."""
    negated = text.startswith("[^")
    result: list[str] = []
    pieces = _SET_PIECE.findall(text[1 + negated : -1])
    is_class = [piece[1:].lower() in _NARROW or (piece[:2] in (r"\p", r"\P") and len(piece) > 2) for piece in pieces]
    may_start_range = False  # whether the previous piece may be the first character of a range
    for index, piece in enumerate(pieces):
        name = piece[1:]
        is_range = piece == "-" and may_start_range and is_class[index + 1 : index + 2] == [False]
        may_start_range = not (is_range or is_class[index] or result[-1:] == ["-"])
        if is_range:
            result.append(piece)
        elif not name:
            result.append(piece if piece.isalnum() or not piece.isascii() else rf"\x{{{ord(piece):X}}}")
        elif name.lower() in _NARROW:
            result.append(_class_content(name, negated=negated))
        elif name[0] in "ux" and len(name) > 1:
            result.append(rf"\x{{{name[1:]}}}")
        elif name in _JSON_ESCAPES or (name[0] in "pP" and len(name) > 1):
            result.append(piece)
        elif name.isalnum():
            raise _unsupported_error(pattern, f"\\{name} in a set")
        else:
            result.append(rf"\x{{{ord(name):X}}}")
    if not result:
        raise _unsupported_error(pattern, "an empty set")
    return f"[{'^' if negated else ''}{''.join(result)}]"


def _character_expression(pattern: str, char: str) -> str:
    """Return the expression of a character as it is written in a JSON string."""
    if char in '"\\':
        return r"(\\\\)" if char == "\\" else r'(\\")'
    if not char.isprintable():
        raise _unsupported_error(pattern, f"the character {char!r}")
    return char if char.isalnum() or not char.isascii() or char == " " else f"\\{char}"


def _unsupported_error(pattern: str, construct: str) -> ConfigError:
    return ConfigError(f"pattern {pattern[:60]!r} has {construct}, which cannot be guaranteed; write it without")
