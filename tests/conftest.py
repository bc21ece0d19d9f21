"""What every test runs under: one thread, fixed seeds, and property tests that give the same answer each time."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.skips", "tests.device", "tests.leftovers"]
torch.set_num_threads(1)
LEFT_OUT = ("soak", "thorough")

settings.register_profile(
    "remask",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("remask")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `few(n)`, all but each n-th become `thorough` ones.

    Those and the soak run only where a marker expression asks for them, or where tests are named one by one.
    """
    seen = Counter[str]()
    for item in items:
        few = item.get_closest_marker("few")
        test = item.nodeid.partition("[")[0]
        if few is not None and seen[test] % few.args[0]:
            item.add_marker("thorough")
        seen[test] += 1
    if config.option.markexpr or any("::" in name for name in config.args):
        return
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(0)
