"""Establishes the oracle of mixtures of experts: dense passes, routing and decodes against the recorded originals."""

import pytest
import torch
from torch import Tensor

from tests import goldens
from tests.goldens import moe
from tests.oracles import block_causal
from tests.oracles.decode import decode
from tests.oracles.experts import LladaMoeModel, SdarMoeModel, load, routed
from tests.oracles.recorded import EACH_DTYPE, close
from tests.sampling_fields import ungrouped

BLOCK = 8  # of the recorded passes


def cases(model: str) -> list[str]:
    found = [key.removesuffix(".logits") for key in moe.logits(model) if key.endswith(".logits")]
    assert len(found) >= 2
    return found


def choice(weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen experts of dense weights [T, E], ascending, and their weights."""
    chosen = torch.stack([row.nonzero()[:, 0] for row in weights])
    assert chosen.shape == experts.shape
    return chosen, weights.gather(1, chosen)


@EACH_DTYPE
@pytest.mark.parametrize("name", moe.MODELS)
def test_dense_logits_and_routing(name: str, dtype: torch.dtype) -> None:
    model, recorded = load(moe.model_dir(name), dtype), moe.logits(name)
    with routed(model) as seen:
        for case in cases(name):
            seen.clear()
            tokens = recorded[f"{case}.input_ids"].flatten()
            out = model.forward(tokens) if isinstance(model, LladaMoeModel) else model.forward(tokens, BLOCK)
            close(out.logits, recorded[f"{case}.logits"].view(len(tokens), -1))
            experts, weights = recorded[f"{case}.router_experts"], recorded[f"{case}.router_weights"]
            for layer, dense in enumerate(seen):
                chosen, its_weights = choice(dense, experts[layer])
                assert torch.equal(chosen, experts[layer])
                torch.testing.assert_close(its_weights.float(), weights[layer], rtol=0, atol=1e-4)
            assert len(seen) == len(experts)


@pytest.mark.parametrize("name", moe.MODELS)
def test_dense_states_and_kv(name: str) -> None:
    model, recorded = load(moe.model_dir(name)), moe.logits(name)
    (case,) = (key.removesuffix(".hidden_states") for key in recorded if key.endswith(".hidden_states"))
    tokens, states = recorded[f"{case}.input_ids"].flatten(), recorded[f"{case}.hidden_states"]
    out = model.forward(tokens) if isinstance(model, LladaMoeModel) else model.forward(tokens, BLOCK)
    close(out.states[:-1], states[:-1])
    close(model.norm(out.states[-1], model.last_norm), states[-1])
    k, v = ("k_pre_rope", "v") if isinstance(model, LladaMoeModel) else ("k_cache", "v_cache")
    close(out.kv.k.transpose(1, 2), recorded[f"{case}.{k}"])
    close(out.kv.v.transpose(1, 2), recorded[f"{case}.{v}"])


def test_runs_of_llada_moe() -> None:
    model = load(moe.model_dir(moe.MASKED))
    for run in moe.masked_runs()[::5]:
        done = decode(model, ungrouped(goldens.request_line(run, "r")))
        assert done.output_ids == run["output_ids"]
        assert [transfer[1:] for transfer in done.transfers] == [event[1:] for event in goldens.transfers(run)]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", moe.BLOCK_CAUSAL)
def test_runs_of_block_causal_models(name: str) -> None:
    model = load(moe.model_dir(name))
    assert isinstance(model, SdarMoeModel)
    for run in moe.runs(name)[::5]:
        done = block_causal.decode(model, ungrouped(run.request_line()))
        assert done.output_ids == run.expected_ids(), run.id
        assert [transfer[1:] for transfer in done.transfers] == run.expected_transfers(), run.id
        if done.edits:
            assert done.edits == run.expected_edits(), run.id
        if not run.recorded["params"].get("eos_early_stop"):
            assert done.kinds == run.recorded["kinds"], run.id
