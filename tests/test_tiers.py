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


ROTATING = """
import pytest

pytestmark = pytest.mark.thorough

@pytest.mark.parametrize("n", range(40))
def test_any(n): pass

@pytest.mark.skipif(False, reason="needs a program: apt-get install it")
@pytest.mark.parametrize("n", range(10))
def test_with_a_program(n): pass

@pytest.fixture
def browser(): pass

@pytest.mark.parametrize("n", range(10))
def test_in_a_browser(n, browser): pass

@pytest.mark.soak
def test_for_minutes(): pass
"""


def test_four_quarters_run_each_test_that_is_not_quick_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(Path(tiers.__file__).read_text(encoding="utf-8"))
    pytester.makepyfile(test_quick=FILE.replace("thorough", "skip"), test_rotating=ROTATING)
    found = []
    for quarter in "0123":
        passed, *others = pytester.inline_run("--strict-markers", "--quarter", quarter).listoutcomes()
        assert others == [[], []]
        found.append({report.nodeid.partition("::")[2] for report in passed})
    assert len(found[0] | found[1] | found[2] | found[3]) == sum(map(len, found)) == 60 + 4
    assert {name for name in found[0] if "any" not in name and "alike" not in name} == {
        f"{name}[{n}]" for name in ("test_with_a_program", "test_in_a_browser") for n in range(10)
    }
    assert all(any("any" in name for name in part) for part in found)


def test_what_a_quick_test_should_not_take_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails by it: the time of a test depends on the machine."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(Path(tiers.__file__).read_text(encoding="utf-8"))
    pytester.makepyfile(
        test_file="""
        import conftest

        spent = [0.0]
        conftest.cpu_seconds = lambda: spent[0]

        def test_long():
            spent[0] += 2.5

        def test_short():
            spent[0] += 1.4
        """
    )
    (named,) = [line for line in pytester.runpytest("--tier", "quick").outlines if "test_file.py::" in line]
    assert named.split() == ["2.5", "s", "test_file.py::test_long"]
    for words in ((), ("--tier", "quick", "--quarter", "0")):
        assert not any("test_long" in line for line in pytester.runpytest(*words).outlines)


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


@pytest.mark.parametrize(("quarter", "status"), [("0", 2), ("1", 5), ("2", 5), ("3", 5)])
def test_a_module_that_is_skipped_is_missed_in_the_first_quarter(
    inner: pytest.Pytester, quarter: str, status: int
) -> None:
    inner.makeconftest('pytest_plugins = ["tests.skips", "tests.tiers"]')
    assert inner.runpytest_inprocess("--no-skips", "--quarter", quarter, "test_module.py").ret == status


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


@pytest.mark.parametrize("processes", ["0", pytest.param("2", marks=pytest.mark.thorough)])
def test_what_was_skipped_runs_once_it_is_there(inner: pytest.Pytester, processes: str) -> None:
    run = inner.runpytest_inprocess if processes == "0" else inner.runpytest_subprocess
    run("-n", processes).assert_outcomes(passed=1, skipped=5, xfailed=1)
    inner.makepyfile(
        test_tests=FILES["test_tests"].replace("skipif(True", "skipif(False").replace("pytest.skip(", "print("),
        test_module="def test_of_it(): ...",
    )
    for _ in range(2):
        run("--skipped", "-n", processes).assert_outcomes(passed=4)
    run("-n", processes).assert_outcomes(passed=5, skipped=1, xfailed=1)
    run("--skipped", "-n", processes).assert_outcomes()
