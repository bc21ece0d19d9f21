"""A pytest plugin: which tests run where. This is the one place that says so.

| command         | `--tier`   | tests                                                                              |
|-----------------|------------|------------------------------------------------------------------------------------|
| `make test`     | `quick`    | every subject, on chosen cases: all that carries none of the marks below           |
| `make thorough` | `thorough` | all of these and what `few` and `thorough` mark, with branch coverage and limits   |
| `make soak`     | `soak`     | what `soak` marks: long random runs, and whatever needs real time                  |

Marks stand at the tests. `few(n)`: of many cases that are alike every n-th is quick, from the first on; an n that has
no divisor in common with the number of values of a parameter lets the quick ones go through the values of each.
`thorough`: a test whose subject a quick one shows too, or that takes more than five seconds of CPU time. `soak`: one
that takes minutes.

Without `--tier`, tests that are named by file and function run whatever their mark, and of anything else the quick
ones.
"""

from collections import Counter
from typing import Final

import pytest

LEFT_OUT: Final = {"quick": ("soak", "thorough"), "thorough": ("soak",)}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register `--tier`."""
    parser.addoption("--tier", choices=[*LEFT_OUT, "soak"], help="which tests run: see tests/tiers.py")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    for line in (
        "few(n): of many cases that are alike, every n-th is quick",
        "thorough: not quick (make thorough)",
        "soak: takes minutes, or needs real time (make soak)",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier that is asked for."""
    seen = Counter[str]()
    for item in items:
        few = item.get_closest_marker("few")
        test = item.nodeid.partition("[")[0]
        if few is not None and seen[test] % few.args[0]:
            item.add_marker("thorough")
        seen[test] += 1
    tier = config.getoption("tier")
    if tier is None and (config.option.markexpr or any("::" in name for name in config.args)):
        return
    if tier == "soak":
        kept = [item for item in items if item.get_closest_marker("soak")]
    else:
        left_out = LEFT_OUT[tier or "quick"]
        kept = [item for item in items if not any(item.get_closest_marker(mark) for mark in left_out)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
