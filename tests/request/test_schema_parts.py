"""Expressions of ranges, against every number near them; patterns, against `re.search` on what they let through."""

import json
import random
import re

import pytest

from remask.request.schema_parts import FORMATS, decimal_range, integer_range, string_pattern


def inside(value: float, low: int | None, high: int | None, *, open_low: bool = False, open_high: bool = False) -> bool:
    above = low is None or (value > low if open_low else value >= low)
    return above and (high is None or (value < high if open_high else value <= high))


@pytest.mark.parametrize("seed", range(16))
def test_ranges_hold_exactly_their_numbers(seed: int) -> None:
    rng = random.Random(seed)
    low, high = sorted(rng.sample(range(-1200, 1200), 2))
    bounds = rng.choice([low, None, low // 100]), rng.choice([high, None, high // 100 + 13])
    ends = {"open_low": rng.random() < 0.5, "open_high": rng.random() < 0.5}
    if None not in bounds and bounds[0] >= bounds[1]:  # type: ignore[operator]
        bounds = low, high
    whole, decimal = integer_range(*bounds), decimal_range(*bounds, **ends)
    assert whole is not None
    assert decimal is not None
    for value in range(-1300, 1301):
        assert bool(re.fullmatch(whole, str(value))) == inside(value, *bounds)
        assert bool(re.fullmatch(decimal, str(value))) == inside(value, *bounds, **ends)
        for fraction in (".5", ".0", ".25"):
            text = f"{value}{fraction}"
            if value or "0.0" not in text:
                assert bool(re.fullmatch(decimal, text)) == inside(float(text), *bounds, **ends), text
    for text in ("-0", "007", "1.", "-", "", " 1", "+1"):
        assert not re.fullmatch(whole, text)
        assert not re.fullmatch(decimal, text)


def test_empty_ranges() -> None:
    assert integer_range(3, 2) is None
    assert decimal_range(3, 2, open_low=False, open_high=False) is None
    assert decimal_range(3, 3, open_low=True, open_high=False) is None
    assert decimal_range(3, 3, open_low=False, open_high=False) is not None


def as_python(pattern: str) -> str:
    """Its expression. Python has no intersections of classes, so the one that is used is spelled out here."""
    plain = r"[^\"\\\x00-\x1F\x7F-\x9F]"
    found = re.sub(
        rf"\[(\[[^\]]*\])&&{re.escape(plain)}\]", lambda m: f"(?:(?={plain}){m[1]})", string_pattern(pattern)
    )
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\u{m[1]:0>4}", found)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^[a-c]+$", ["a", "abc"], ["", "abd", 'a"']),
        ("ab|^c$", ["ab", "xabx", "c"], ["cc", "a"]),
        ('a"b', ['a"b', '-a"b-'], ["ab"]),
        (r"^\\$", ["\\"], ["\\\\", ""]),
        (r"^\d{2}-\w?$", ["12-", "12-x"], ["1-", "12-xy"]),
        (r"^\u0041\x42?$", ["A", "AB"], ["B"]),
        (r"^(?:foo|b.r)*?$", ["", "foobar", "b-r"], ["fo"]),
        (r"^a\nb\t?$", ["a\nb", "a\nb\t"], ["ab"]),
        (r"^\.\/[.]$", ["./."], ["a/."]),
        ("^é€$", ["é€"], ["e"]),
        (r"^[^\s&~-]$", ["a", "é"], [" ", "&", "-", "\u2003"]),
        (r"^[\-[\u0041]$", ["-", "[", "A"], ["B"]),
    ],
)
def test_patterns_over_json(pattern: str, good: list[str], bad: list[str]) -> None:
    found = as_python(pattern)
    for text in good:
        assert re.search(pattern, text)
        assert re.fullmatch(found, json.dumps(text, ensure_ascii=False)[1:-1]), (found, text)
    for text in bad:
        assert not re.fullmatch(found, json.dumps(text, ensure_ascii=False)[1:-1]), (found, text)


@pytest.mark.parametrize(
    ("held", "good", "bad"),
    [(r"\w-z", "a-z", "`"), (r"!-\w", "!-a", "#"), ("^--/", "a+", "-./"), ("a-c-e", "abc-e", "d"), ("+--", "+,-", ".")],
)
def test_dashes_of_sets_are_those_of_ecma(held: str, good: str, bad: str) -> None:
    """Beside a class a dash is one, and a dash may begin or end a range; Python takes some of these for mistakes."""
    found = as_python(f"^[{held}]$")
    assert [bool(re.fullmatch(found, char)) for char in good + bad] == [True] * len(good) + [False] * len(bad)


def test_formats_are_lists_of_what_is_said() -> None:
    samples = {
        "date": ("2026-11-22", "2026-02-30"),
        "date-time": ("2026-11-22T23:59:59.5Z", "2026-11-22 23:59:59Z"),
        "email": ("a.b@c.de", "a@b"),
        "ipv4": ("192.168.0.1", "256.1.1.1"),
        "ipv6": ("0:0:0:0:0:0:0:1", "::1::"),
        "time": ("10:11:12+02:00", "24:00:00Z"),
        "uuid": ("00000000-0000-0000-0000-00000000000a", "0"),
    }
    assert samples.keys() == FORMATS.keys()
    for name, (good, bad) in samples.items():
        assert re.fullmatch(FORMATS[name], good)
        assert not re.fullmatch(FORMATS[name], bad)
