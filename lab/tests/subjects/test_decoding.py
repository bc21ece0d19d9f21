"""K/V around decoding: against the dense oracle, and on traces whose figures are known."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab.tests.subjects.support import PROMPT, open_model, work

from remask.llm import LLM
from remask_lab.instruments.watch import UncachedWatcher
from remask_lab.subjects import decoding
from remask_lab.subjects.decoding import DecodingTrace, measure_decoding, reading, summarise
from tests import goldens as masked
from tests.engine import kinds
from tests.goldens import uniform as goldens
from tests.oracles import dense


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_moves_against_the_dense_oracle(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "KEPT", 5)
    llm = open_model(masked.model_dir(family))
    trace = UncachedWatcher(llm, "a test").trace(work(llm, block_length=4), DecodingTrace())
    (output,) = llm.session.run([work(llm, block_length=4)], trace=True)
    assert output.trace is not None
    model = dense.load(masked.model_dir(family))
    canvas = torch.tensor(PROMPT + [model.mask_id] * 12)
    states, decoded = [], torch.full((12,), -1)
    for number, event in enumerate(output.trace):
        kv = model.forward(canvas).kv
        states.append(torch.stack([kv.k, kv.v]).flatten(3)[:, :, len(PROMPT) :])
        canvas[list(event.positions)] = torch.tensor(event.token_ids)
        decoded[torch.tensor(event.positions) - len(PROMPT)] = number
    assert trace.decoded.tolist() == decoded.tolist()
    every = torch.stack(states)
    cosine = 1 - F.cosine_similarity(every[1:], every[:-1], dim=-1)
    euclidean = (every[1:] - every[:-1]).norm(dim=-1)
    moves = np.stack(trace.moves)
    np.testing.assert_allclose(moves[:, :2], cosine.numpy(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(moves[:, 2:], euclidean.numpy(), rtol=1e-3, atol=1e-3)
    steps = [step for step, _ in trace.kept]
    assert steps == list(range(0, trace.passes, 4 if trace.passes > 10 else 2)), "five at most"
    kept = every[steps]
    expected = F.cosine_similarity(kept[:, None], kept[None], dim=-1).mean((3, 4)).permute(2, 0, 1)
    np.testing.assert_allclose(trace.similarity(), expected.numpy(), atol=2e-5)
    report = summarise(llm, [trace], window=2)
    at = [cosine[number, 0, :, place].mean() for place, number in enumerate(decoded.tolist()) if number < len(cosine)]
    assert report.aligned["k cosine"].mean[2] == pytest.approx(float(torch.stack(at).mean()), abs=1e-5)
    assert (report.tokens, report.counts[2]) == (len(at), len(at))


def made(llm: LLM, decoded: list[int], pairs: int) -> DecodingTrace:
    """A trace in which a token moves by 1 before it is decoded, by 10 then, and by 2 afterwards."""
    moves = np.zeros((pairs, 4, llm.loaded.config.layers, len(decoded)), dtype=np.float32)
    for position, step in enumerate(decoded):
        for pair in range(pairs):
            moves[pair, :, :, position] = 10 if pair == step else 1 if pair < step else 2
    return DecodingTrace(np.array(decoded), passes=pairs + 1, moves=list(moves))


def test_curves_are_aligned_at_the_step_that_decodes() -> None:
    llm = open_model(masked.model_dir("llada"))
    report = summarise(llm, [made(llm, [2, 0, -1, 3], pairs=3)], window=2)
    assert report.offsets == (-2, -1, 0, 1, 2)
    assert report.counts == (2, 2, 2, 1, 1)
    assert report.aligned["v euclidean"].mean == (1, 1, 10, 2, 2)
    assert report.tokens == 2, "one never changes, and after the last pass nothing is seen"
    assert (report.order, report.decoded) == ((1, 0, 3), (1, 3, 4))
    assert report.around("k cosine") == (1, 10, 2)
    assert report.moves["k"][0] == (10, 2, 2)
    told = reading(report)
    assert "K moves by a mean cosine distance of 1.00e+01 when its token appears, 1.00e+00 from pass to pass" in told
    assert "2.00e+00 after it (5.0 times less). It moves most when it appears." in told


def test_nothing_to_align() -> None:
    llm = open_model(masked.model_dir("llada"))
    report = measure_decoding(llm, [work(llm, steps=1)])
    assert report.tokens == 0
    assert "nothing to align" in reading(report)


def test_uniform_models_decode_a_token_when_it_last_changes() -> None:
    llm = open_model(goldens.model_dir("gentle"))
    sampling: dict[str, Any] = {"seed": 3, "block_length": 6, "steps_per_block": 4}
    report = measure_decoding(llm, [work(llm, **sampling)])
    assert report.passes == 8
    assert 0 < report.tokens <= 12
    assert len(report.moves["v"]) == len(report.order) <= 12
    assert "tokens of 1 requests" in reading(report)


def test_block_causal_rows_are_followed_from_their_block_on() -> None:
    found = kinds.checkpoint("sdar")
    llm = open_model(found.folder)
    report = measure_decoding(llm, [work(llm)])
    assert np.isnan(np.array(report.moves["k"])).any()
    assert report.tokens > 0
    assert np.isfinite(report.aligned["k cosine"].mean[8])
