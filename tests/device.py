"""A pytest plugin: `--device` names the device of golden runs and of kernels, the CPU without it.

With `--overlap` engines of tests and golden runs queue passes before those before them are read.
"""

import os
from collections.abc import Iterator

import pytest
import torch

_chosen = ["cpu"]
_overlap = [False]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register `--device` and `--overlap`."""
    parser.addoption("--device", default="cpu", help="device of golden runs and of kernels (default cpu)")
    parser.addoption("--overlap", action="store_true", help="queue passes before those before them are read")


def pytest_configure(config: pytest.Config) -> None:
    """Note the device for `device`. On a CPU Triton's kernels run in its interpreter."""
    _chosen[:] = [config.getoption("device")]
    _overlap[:] = [config.getoption("overlap")]
    if device() == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported


def device() -> str:
    """The name of the device."""
    return _chosen[0]


def overlap() -> bool:
    """Whether passes are queued ahead."""
    return _overlap[0]


@pytest.fixture
def on_device() -> Iterator[None]:
    """New tensors are on the device."""
    with torch.device(device()):
        yield
