"""Each tier runs its tests, tests that are named run whatever their mark, and skips are reported."""

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


FILES = {
    "test_tests": """
        import pytest

        @pytest.mark.skipif(True, reason="needs a browser: apt-get install one")
        @pytest.mark.parametrize("number", [1, 2])
        def test_marked(number): ...

        def test_inside():
            pytest.skip("needs an extra: pip install it")

        @pytest.mark.skip(reason="needs a GPU")
        def test_gpu(): ...

        @pytest.mark.xfail(strict=True)
        def test_expected_failure():
            assert False

        def test_that_runs(): ...
    """,
    "test_module": """
        import pytest

        pytest.skip("needs an extra: pip install it", allow_module_level=True)
    """,
}


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with `FILES`, in which pytest runs with the plugin and none of this run's options."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest('pytest_plugins = ["tests.skips"]')
    pytester.makepyfile(**FILES)
    return pytester


@pytest.mark.few(2)
@pytest.mark.parametrize("processes", ["0", "2"])
def test_the_summary_groups_skips_by_reason(inner: pytest.Pytester, processes: str) -> None:
    result = inner.runpytest_subprocess("-n", processes)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=5, xfailed=1)
    lines = result.outlines
    start = next(place for place, line in enumerate(lines) if "skipped, and what would run it" in line)
    assert lines[start + 1 : start + 8] == [
        "needs a GPU",
        "    test_tests.py: 1 test",
        "needs a browser: apt-get install one",
        "    test_tests.py: 2 tests",
        "needs an extra: pip install it",
        "    test_module.py: the whole file",
        "    test_tests.py: 1 test",
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("processes", ["0", "2"])
def test_only_a_missing_gpu_is_an_excuse_where_skips_are_forbidden(inner: pytest.Pytester, processes: str) -> None:
    result = inner.runpytest_subprocess("--no-skips", "--continue-on-collection-errors", "-n", processes)
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1, errors=3, skipped=1, xfailed=1)
    for name in ("test_marked[[]1]", "test_marked[[]2]"):
        result.stdout.fnmatch_lines([f"*test_tests.py::{name} was skipped*: needs a browser: apt-get install one"])
    result.stdout.fnmatch_lines(["*test_tests.py::test_inside was skipped*: needs an extra: pip install it"])
    result.stdout.fnmatch_lines(["*test_module.py was skipped*: needs an extra: pip install it"])
    result.stdout.fnmatch_lines(["needs a GPU", "    test_tests.py: 1 test"])


@pytest.mark.thorough
def test_nothing_is_written_where_nothing_was_skipped(inner: pytest.Pytester) -> None:
    result = inner.runpytest_subprocess("-k", "runs", "test_tests.py")
    result.assert_outcomes(passed=1, deselected=5)
    result.stdout.no_fnmatch_line("*what would run it*")
