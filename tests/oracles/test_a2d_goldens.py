"""Establishes the oracle of A2D and Stable-DiffCoder: dense passes and decodes against the recorded originals."""

import pytest
import torch

from tests.goldens import a2d as goldens
from tests.oracles.a2d import decode, linear_counts, model

EACH_MODEL = pytest.mark.parametrize("name", [name for name in goldens.MODELS if name != "modernbert"])


@EACH_MODEL
def test_dense_logits(name: str) -> None:
    recorded = goldens.logits(name)
    tokens = torch.tensor(recorded["input_ids"])
    out = model(goldens.model_dir(name)).forward(tokens, recorded.get("block_size", len(tokens)))
    found = out.logits[recorded["rows"]]
    torch.testing.assert_close(found, torch.tensor(recorded["logits"]).double(), rtol=0, atol=5e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("share", range(4))
@EACH_MODEL
def test_every_run(name: str, share: int) -> None:
    runs = {each: run for several in goldens.runs(name).values() for each, run in several.items()}
    assert len(runs) >= 24
    for each, run in list(runs.items())[share::4]:
        decoded = decode(model(goldens.model_dir(name)), run)
        assert decoded.tokens == run["tokens"], each
        assert decoded.trace == run["trace"], each
        assert len(decoded.trace) == run.get("passes", len(decoded.trace)), each


def test_the_linear_schedule_settles_all_masks() -> None:
    assert linear_counts(16, 3) == [5, 5, 6], "float32 has a share of 11 a little below 5.5"
    assert linear_counts(4, 10) == [1, 1, 1, 1], "idle steps are left out"
    for masks in range(1, 65, 3):
        for steps in range(1, 80, 5):
            counts = linear_counts(masks, steps)
            assert (sum(counts), min(counts) > 0) == (masks, True)
