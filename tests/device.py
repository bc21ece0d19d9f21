"""A pytest plugin: `--device` names the device of golden runs and of kernels, the CPU without it.

With `--overlap` engines of tests and golden runs queue passes before those before them are read; with `--graphs` they
repeat layers as graphs; `--attention` names what computes attention in golden runs.
"""

import os
from collections.abc import Iterator
from functools import wraps

import pytest
import torch

_chosen = ["cpu"]
_overlap = [False]
_graphs = [False]
_attention = ["auto"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of golden runs and of kernels (default cpu)")
    parser.addoption("--overlap", action="store_true", help="queue passes before those before them are read")
    parser.addoption("--graphs", action="store_true", help="repeat layers of dense models as graphs")
    parser.addoption("--attention", default="auto", help="what computes attention in golden runs (default auto)")


def pytest_configure(config: pytest.Config) -> None:
    """Note the device for `device`. On a CPU Triton's kernels run in its interpreter."""
    _chosen[:] = [config.getoption("device")]
    _overlap[:] = [config.getoption("overlap")]
    _graphs[:] = [config.getoption("graphs")]
    _attention[:] = [config.getoption("attention")]
    if device() == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported


def device() -> str:
    return _chosen[0]


def overlap() -> bool:
    return _overlap[0]


def graphs() -> bool:
    """Whether layers of dense models are repeated as graphs."""
    return _graphs[0]


def attention() -> str:
    """What computes attention in golden runs."""
    return _attention[0]


@pytest.fixture(scope="session", autouse=True)
def _graphs_on_cpus() -> Iterator[None]:
    """On a CPU a stand-in records what graphs repeat.

    Their buffers are NaN whenever nothing runs, so that a test finds what reads spare rows.
    """
    from remask.model import executors
    from remask.model.graphs import Graphs, Layers, round_up
    from remask.model.stage import Stage
    from tests.recording import recorded_on

    run = Graphs.run

    @wraps(run)
    def poisoned(self: Graphs, model: Layers, stage: Stage, h: torch.Tensor) -> torch.Tensor:
        left = run(self, model, stage, h)
        if h.device.type == "cpu":
            buffers = self._buffers[round_up(len(h))]
            for tensor in (buffers.h, buffers.q, buffers.attended):
                tensor.fill_(torch.nan)
        return left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "capture_on", recorded_on)
        patch.setattr(Graphs, "run", poisoned)
        yield


@pytest.fixture
def on_device() -> Iterator[None]:
    """New tensors are on the device."""
    with torch.device(device()):
        yield
