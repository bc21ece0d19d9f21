"""A pytest plugin for skipped tests: a summary by reason, and `--no-skips` for machines on which all tests can run.

The reason of a skip says what is missing and how to get it: `needs a browser: apt-get install chromium`. A test that
needs a GPU gives a reason with the word GPU; `--no-skips` lets those pass.

A run remembers what it skipped for another reason, and `--skipped` runs just that, once it is there.
"""

import re
from collections import Counter
from collections.abc import Generator, Iterable

import pytest

Report = pytest.TestReport | pytest.CollectReport

GPU = re.compile(r"\bGPU\b")
_KEY = "remask/skipped"  # in pytest's cache: the tests and modules that were skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped", action="store_true", help="run what the last run skipped, unless it needs a GPU")
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails, unless its reason is a missing GPU")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--skipped` keep the tests that the last run skipped, and those of modules that it did."""
    if not config.getoption("skipped"):
        return
    if not config.pluginmanager.has_plugin("cacheprovider"):
        raise pytest.UsageError("--skipped needs pytest's cache: leave out -p no:cacheprovider")
    names = set(config.cache.get(_KEY, []))
    kept = [item for item in items if {item.nodeid, item.nodeid.partition("::")[0]} & names]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into a failure where skips are forbidden."""
    report = yield
    _forbid(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole module into an error where skips are forbidden.

    What a whole module needs, and the extra `dev` does not bring, is in the first quarter (`tests/tiers.py`), so other
    quarters go without it.
    """
    report = yield
    if not collector.config.getoption("quarter", None):
        _forbid(report, collector.config)
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was skipped, grouped by reason. The reasons say how to run it."""
    skipped: list[Report] = terminalreporter.stats.get("skipped", [])
    config = terminalreporter.config
    if config.pluginmanager.has_plugin("cacheprovider") and not config.getoption("skipped"):
        config.cache.set(_KEY, [report.nodeid for report in skipped if not GPU.search(_reason(report))])
    if not skipped:
        return
    terminalreporter.write_sep("=", "skipped, and what would run it")
    for line in summary(skipped):
        terminalreporter.write_line(line)


def summary(skipped: Iterable[Report]) -> list[str]:
    """The lines of the summary: each reason, and below it the files with the numbers of their tests."""
    groups: dict[str, Counter[str]] = {}
    for report in skipped:
        kind = "test" if isinstance(report, pytest.TestReport) else "module"
        groups.setdefault(_reason(report), Counter())[f"{kind} {report.nodeid.split('::')[0]}"] += 1
    lines = []
    for reason, files in sorted(groups.items()):
        lines.append(f"{reason}")
        for kind, file in sorted(name.split(" ", 1) for name in files):
            count = files[f"{kind} {file}"]
            number = "the whole file" if kind == "module" else f"{count} test{'s' * (count > 1)}"
            lines.append(f"    {file}: {number}")
    return lines


def _forbid(report: Report, config: pytest.Config) -> None:
    """Make a skipped report a failed one, unless an expected failure or a missing GPU is its reason."""
    if not config.getoption("no_skips") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = _reason(report)
    if not GPU.search(reason):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which --no-skips forbids: {reason}"


def _reason(report: Report) -> str:
    # Pytest gives a skip as (file, line, text).
    text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
