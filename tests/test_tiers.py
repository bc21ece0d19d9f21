"""Each tier runs its tests, and tests that are named one by one run whatever their mark."""

from pathlib import Path

import pytest

from tests import tiers

pytest_plugins = ["pytester"]

FILE = """
import pytest

def test_plain(): pass

@pytest.mark.few(3)
@pytest.mark.parametrize("n", range(7))
def test_alike(n): pass

@pytest.mark.thorough
def test_long(): pass

@pytest.mark.soak
def test_for_minutes(): pass
"""
QUICK = {"test_plain", "test_alike[0]", "test_alike[3]", "test_alike[6]"}
THOROUGH = QUICK | {f"test_alike[{n}]" for n in range(7)} | {"test_long"}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", QUICK),
        ("--tier quick", QUICK),
        ("--tier thorough", THOROUGH),
        ("--tier soak", {"test_for_minutes"}),
        ("-m thorough", THOROUGH - QUICK),
        ("test_file.py::test_for_minutes test_file.py::test_long", {"test_for_minutes", "test_long"}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_tier_runs_its_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: str, found: set[str]
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(Path(tiers.__file__).read_text(encoding="utf-8"))
    pytester.makepyfile(test_file=FILE)
    passed, *others = pytester.inline_run("--strict-markers", *words.split()).listoutcomes()
    assert {report.nodeid.partition("::")[2] for report in passed} == found
    assert others == [[], []]
