"""A pytest plugin: `--device` names the device of golden runs and of kernels, the CPU without it."""

import os
from collections.abc import Iterator

import pytest
import torch

_chosen = ["cpu"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register `--device`."""
    parser.addoption("--device", default="cpu", help="device of golden runs and of kernels (default cpu)")


def pytest_configure(config: pytest.Config) -> None:
    """Note the device for `device`. On a CPU Triton's kernels run in its interpreter."""
    _chosen[:] = [config.getoption("device")]
    if device() == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported


def device() -> str:
    """The name of the device."""
    return _chosen[0]


@pytest.fixture
def on_device() -> Iterator[None]:
    """New tensors are on the device."""
    with torch.device(device()):
        yield
