"""Establishes the oracle of Nemotron-Labs-Diffusion: the recorded runs, with what each pass did."""

import pytest

from tests.goldens import nemotron as goldens
from tests.oracles import nemotron

SHARES = 6


@pytest.mark.few(2)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("name", goldens.MODELS)
def test_every_run(name: str, share: int) -> None:
    model, runs = nemotron.load(goldens.folder(name)), goldens.runs(name)
    assert len(runs) == 96
    for run in runs[share::SHARES]:
        done = nemotron.decode(model, run["prompt"], goldens.sampling(run))
        assert done.tokens == run["tokens"]
        assert done.trace == run.get("trace", [])
        assert done.accepted == run.get("accepted", [])
