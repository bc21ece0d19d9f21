"""A pytest plugin: `--device` names the device on which the golden runs are computed, the CPU without it."""

import pytest

_chosen = ["cpu"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register `--device`."""
    parser.addoption("--device", default="cpu", help="device of the golden runs (default cpu)")


def pytest_configure(config: pytest.Config) -> None:
    """Note the device for `device`."""
    _chosen[:] = [config.getoption("device")]


def device() -> str:
    """The name of the device."""
    return _chosen[0]
