import numpy as np
import pytest
import torch

from remask.plan import canvas as canvases
from remask_lab.instruments.depths import first_predictions, row_cosines, run_depth
from tests import goldens
from tests.depth.models import loaded, transformer
from tests.oracles import bicache, dense
from tests.oracles.canvas import Canvas


def test_depth_is_a_run_of_leading_layers_strictly_above_tau() -> None:
    assert run_depth([1, 0.98, 0.97, 0.99], 0.97) == 2
    assert run_depth([0.9, 1.0], 0.97) == 0


def cosine(a: torch.Tensor, b: torch.Tensor, start: int) -> float:
    """The mean cosine over dimensions before `start`, all others flattened."""
    return float(torch.nn.functional.cosine_similarity(a.flatten(start), b.flatten(start), dim=-1).mean())


def test_the_cosine_below_which_a_share_of_the_rows_are() -> None:
    """Four rows, one of which turns by 90 degrees: the least cosine is 0, and half of the rows are at 1 or below."""
    here = torch.tensor([[1.0, 0], [1, 0], [1, 0], [1, 0]])[:, None]
    there = torch.tensor([[2.0, 0], [1, 0], [0, 1], [3, 0]])[:, None]
    found = [row_cosines(((here,), (here,)), ((there,), (here,)), share)[:, 0].tolist() for share in (0, 0.5)]
    assert found == [[0, 1], [1, 1]]


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_first_predictions_by_depth(name: str) -> None:
    """Against the oracle's refreshing pass over leased K/V and states, at every depth."""
    folder, prompt, prefix, masks = goldens.model_dir(name), goldens.prompts()["s0a"], 20, 5
    model, oracle = transformer(loaded(str(folder))), dense.load(folder)
    asked = canvases.Canvas.masked(prompt, masks, oracle.mask_id)
    found = dict(first_predictions(model, asked, prefix, range(model.config.layers + 1)))
    canvas = Canvas(prompt, masks, oracle.mask_id)
    leased = bicache.lease(oracle, canvas, prefix)
    nothing = oracle.empty_kv(canvas.length)
    for depth, predicted in found.items():
        out = bicache.refresh_pass(oracle, canvas, leased, depth, ~leased.rows, nothing, "stored")
        wanted = oracle.predictions(out.logits)[-masks:].log_softmax(-1)
        np.testing.assert_allclose(predicted.double(), wanted, atol=1e-4)
    assert not torch.allclose(found[0], found[model.config.layers], atol=1e-3)
