"""Lower bounds of a pass on a GPU: what they count, and the page."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from remask.families import preset
from remask.plan.pass_cost import ExecutedPlan, pass_cost
from remask.plan.plan import Plan
from remask.plan.spans import Span
from remask_lab.gpu.bounds import GPUS, Launch, launches
from remask_lab.gpu.kernels import Variant, variants
from remask_lab.gpu.steady import find_shape
from tests.engine.executors import NEEDS_TRITON

pytestmark = NEEDS_TRITON
SHAPE = find_shape("llada-8b", torch.device("cpu"))
CONFIG = preset(SHAPE.preset)


def kernel() -> Variant:
    return next(each for each in variants([CONFIG]) if each.products and each.dtype == torch.bfloat16)


@pytest.mark.parametrize("rows", [SHAPE.canvas, SHAPE.block])
def test_products_are_those_of_the_cost_model(rows: int) -> None:
    """But for rows and slots with which the tiles of attention are filled up."""
    predict = np.arange(SHAPE.canvas) < SHAPE.block
    live = np.arange(SHAPE.canvas) < rows
    plan = Plan((Span(range(CONFIG.layers), live),), predict)
    expected = pass_cost(CONFIG.widths(2), [ExecutedPlan(plan)])
    found = list(launches(CONFIG, SHAPE, 1, rows, (kernel(), 757)))
    products = sum(each.flops for each in found if each.name != "attend")
    attention = sum(each.flops for each in found if each.name == "attend")
    seen = expected.operations["attention"].flops
    assert products == pytest.approx(expected.total.flops - seen, rel=1e-6)
    assert attention == seen * (1 if rows == SHAPE.canvas else 2), "tiles of 64 rows"


def test_partial_results_are_left_where_rows_are_few() -> None:
    left = {
        (requests, rows): sum(each.partial for each in launches(CONFIG, SHAPE, requests, rows, (kernel(), 757)))
        for requests in (1, 8)
        for rows in (SHAPE.canvas, SHAPE.block)
    }
    assert {case for case, partial in left.items() if partial} == {(1, SHAPE.block)}


def test_a_launch_takes_the_longest_of_its_bounds() -> None:
    gpu = GPUS["h100"]
    assert Launch("", gpu.flops, 0).seconds(gpu) == 1
    assert Launch("", 1, gpu.bytes, partial=gpu.bytes / 4).seconds(gpu) == 1
    assert Launch("", 1, gpu.bytes, partial=gpu.bytes / 4).roof(gpu) == 0.75
    assert Launch("", 1, 1, gpu.units * gpu.clock).seconds(gpu) == 1


@pytest.mark.thorough
def test_the_page() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "remask_lab.gpu.bounds"]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split(" | ")[0] for line in told[2:]] == [
        f"| {name}, {requests}" for requests in SHAPE.batches for name in ("full", "cached")
    ]
    wrong = subprocess.run([*command, "--gpu", "a100"], env=env, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "Unknown GPU 'a100'" in wrong.stderr
