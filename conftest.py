"""What every test runs under: one thread, fixed seeds, and property tests that give the same answer each time."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.tiers", "tests.skips", "tests.device", "tests.leftovers"]
torch.set_num_threads(1)

settings.register_profile(
    "remask",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("remask")


def pytest_collection_finish() -> None:
    """Take modules and tests out of what the collector of garbage looks through again and again.

    `tests.leftovers` puts them back at the end of the session, as libraries warn of what the interpreter cannot free.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` also notes its caller for devices that are not there
    np.random.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(0)
