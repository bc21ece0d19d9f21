"""A pytest plugin: which tests run where. This is the one place that says so.

| command         | `--tier`   | tests                                                                              |
|-----------------|------------|------------------------------------------------------------------------------------|
| `make test`     | `quick`    | every subject, on chosen cases: all that carries none of the marks below           |
| `make thorough` | `thorough` | all of these and what `few` and `thorough` mark, with branch coverage and limits   |
| `make soak`     | `soak`     | what `soak` marks: long random runs, and whatever needs real time                  |

Marks stand at the tests. `few(n)`: of many cases that are alike every n-th is quick, from the first on; an n that has
no divisor in common with the number of values of a parameter lets the quick ones go through the values of each.
`thorough`: a test whose subject a quick one shows too, or that takes more than `QUICK_S` seconds of CPU time. `soak`:
one that takes minutes.

CI runs the quick tests and, with `--quarter N`, a fourth of the others: which one follows from the number of commits,
so that four commits in a row run each test. What needs more than the extra `dev` brings is in the first fourth.

Without `--tier`, tests that are named by file and function run whatever their mark, and of anything else the quick
ones. The end of a run names the quick tests that took more than `QUICK_S`; nothing fails by it.
"""

import os
from collections import Counter
from collections.abc import Generator
from typing import Final
from zlib import crc32

import pytest

LEFT_OUT: Final = {"quick": ("soak", "thorough"), "thorough": ("soak",)}
QUARTERS: Final = 4
QUICK_S: Final = 1.5  # of CPU time, child processes included
_BEGAN = pytest.StashKey[float]()
_CPU: Final = "cpu_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register `--tier` and `--quarter`."""
    parser.addoption("--tier", choices=[*LEFT_OUT, "soak"], help="which tests run: see tests/tiers.py")
    text = "of the tests that are neither quick nor a soak, the n-th fourth, counted from 0"
    parser.addoption("--quarter", type=int, choices=range(QUARTERS), help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("tier") == "quick" and config.getoption("quarter") is None:
        config.pluginmanager.register(Slow(), "slow-tests")
    for line in (
        "few(n): of many cases that are alike, every n-th is quick",
        "thorough: not quick (make thorough)",
        "soak: takes minutes, or needs real time (make soak)",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier, or of the fourth, that is asked for."""
    seen = Counter[str]()
    for item in items:
        few = item.get_closest_marker("few")
        test = item.nodeid.partition("[")[0]
        if few is not None and seen[test] % few.args[0]:
            item.add_marker("thorough")
        seen[test] += 1
    tier, quarter = config.getoption("tier"), config.getoption("quarter")
    if quarter is None and tier is None and (config.option.markexpr or any("::" in name for name in config.args)):
        return
    if quarter is not None:
        rest = (item for item in items if item.get_closest_marker("thorough") and not item.get_closest_marker("soak"))
        kept = [item for item in rest if quarter_of(item) == quarter]
    elif tier == "soak":
        kept = [item for item in items if item.get_closest_marker("soak")]
    else:
        left_out = LEFT_OUT[tier or "quick"]
        kept = [item for item in items if not any(item.get_closest_marker(mark) for mark in left_out)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def quarter_of(item: pytest.Item) -> int:
    """The fourth of a test that is not quick: 0 where it may be skipped for want of a package or program, else any."""
    reasons = [str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif")]
    if any(reason.startswith("needs ") for reason in reasons) or "browser" in getattr(item, "fixturenames", ()):
        return 0
    return crc32(item.nodeid.encode()) % QUARTERS


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGAN] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the last report of a test the CPU time of all of it."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((_CPU, cpu_seconds() - item.stash[_BEGAN]))
    return report


class Slow:
    """Collects the tests that took longer than a quick one should."""

    def __init__(self) -> None:
        self.found: list[tuple[float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Look at the time of a test, wherever it ran."""
        taken = dict(report.user_properties).get(_CPU, 0.0)
        if isinstance(taken, float) and taken > QUICK_S:
            self.found.append((taken, report.nodeid))

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name them, the slowest first."""
        if self.found:
            terminalreporter.write_sep("=", f"more than {QUICK_S} s of CPU, so no quick tests (tests/tiers.py)")
            for taken, name in sorted(self.found, reverse=True):
                terminalreporter.write_line(f"{taken:6.1f} s  {name}")
