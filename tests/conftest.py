"""What every test runs under: one thread, fixed seeds, and property tests that give the same answer each time."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.skips", "tests.device"]
torch.set_num_threads(1)

settings.register_profile(
    "remask",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("remask")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests run only where a marker expression asks for them."""
    if config.option.markexpr:
        return
    soak = [item for item in items if item.get_closest_marker("soak") is not None]
    config.hook.pytest_deselected(items=soak)
    items[:] = [item for item in items if item not in soak]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(0)
