"""Establishes the GIDD oracle: dense passes, sampler steps and whole generations against the recorded originals."""

import pytest
import torch
from torch import Tensor

from tests.goldens import uniform as goldens
from tests.oracles import gidd
from tests.oracles import uniform_sampling as sampling
from tests.oracles.dense import KV
from tests.oracles.gidd import GiddModel, structured
from tests.oracles.recorded import EACH_DTYPE

PAST = 9  # clean tokens of the cached cases
LOGITS, SCORES, PROBABILITIES = 1e-4, 5e-6, 1e-5
EACH_MODEL = pytest.mark.parametrize("name", goldens.MODELS)


def close(actual: Tensor, expected: Tensor, atol: float = LOGITS) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=atol)


def golden_model(name: str, dtype: torch.dtype = torch.float64) -> GiddModel:
    return gidd.load(goldens.model_dir(name), dtype)


@EACH_DTYPE
@EACH_MODEL
def test_dense_logits(name: str, dtype: torch.dtype) -> None:
    model, recorded = golden_model(name, dtype), goldens.forward(name)
    seen = structured_rows(recorded["structured.noise_mask"])
    cases: dict[str, tuple[Tensor, list[Tensor], Tensor | None]] = {
        "structured": (recorded["ids"], seen, None),
        "plain": (recorded["ids"], [torch.ones_like(mask) for mask in seen], None),
        "shifted": (recorded["ids"], seen, recorded.get("shifted.position_ids")),
        "cached.full": (recorded["ids"], [structured(torch.arange(24) >= PAST)] * 2, None),
    }
    if "keymask.mask2d" in recorded:
        cases["keymask"] = recorded["ids"], [keys.expand(len(keys), -1) for keys in recorded["keymask.mask2d"]], None
    for case in ("infill", "canvas"):
        if f"{case}.noise_mask" in recorded:
            ids = recorded.get(f"{case}.ids", recorded["ids"])
            cases[case] = ids, structured_rows(recorded[f"{case}.noise_mask"]), None
    compared = 0
    for case, (ids, visible, positions) in cases.items():
        logits = recorded.get(f"{case}_logits" if case == "cached.full" else f"{case}.logits")
        if logits is not None:
            for row, tokens in enumerate(ids):
                places = None if positions is None else positions[row]
                close(model.forward(tokens, visible=visible[row], positions=places).logits, logits[row])
            compared += 1
    assert compared == sum(key.endswith((".logits", "full_logits")) for key in recorded) > 0


def structured_rows(noise_mask: Tensor) -> list[Tensor]:
    return [structured(noisy) for noisy in noise_mask]


@EACH_MODEL
def test_dense_states_and_attention(name: str) -> None:
    model, recorded = golden_model(name), goldens.forward(name)
    for row, tokens in enumerate(recorded["ids"]):
        out = model.forward(tokens, visible=structured(recorded["structured.noise_mask"][row]))
        if "structured.attn_mask" in recorded:
            assert torch.equal(
                structured(recorded["structured.noise_mask"][row]), recorded["structured.attn_mask"][row]
            )
        if "structured.hidden_states" in recorded:
            close(out.states[:-1], recorded["structured.hidden_states"][:-1, row])
            close(model.norm(out.states[-1], model.last_norm), recorded["structured.hidden_states"][-1, row])
        if "structured.attentions" in recorded:
            close(out.attention, recorded["structured.attentions"][:, row], PROBABILITIES)


@pytest.mark.parametrize("name", [name for name in goldens.MODELS if "cached.past_k" in goldens.forward(name)])
def test_a_cached_pass(name: str) -> None:
    model, recorded = golden_model(name), goldens.forward(name)
    sinks = int(model.has_sink)
    for row, tokens in enumerate(recorded["ids"]):
        alone = model.forward(tokens[:PAST])
        expected = KV(recorded["cached.past_k"][:, row, sinks:], recorded["cached.past_v"][:, row, sinks:])
        close(alone.kv.k, expected.k)
        close(alone.kv.v, expected.v)
        if model.has_sink:
            sink_k, sink_v = zip(*map(model.sink, range(model.layers)), strict=True)
            close(torch.stack(sink_k), recorded["cached.past_k"][:, row, :1])
            close(torch.stack(sink_v), recorded["cached.past_v"][:, row, :1])
        suffix = torch.arange(len(tokens)) >= PAST
        out = model.forward(tokens, suffix, alone.kv.padded(len(tokens)), structured(suffix))
        close(out.logits[suffix], recorded["cached.suffix_logits"][row])


def noise_of(shift: float) -> sampling.Noise:
    common = goldens.sampling("torch_steps")[0]
    return sampling.Noise(shift, common["vocab_size"], common["mask_token_id"])


def test_schedules() -> None:
    recorded = {key: grid for key, grid in goldens.sampling("torch_steps")[1].items() if key.startswith("schedule.")}
    assert len(recorded) >= 4
    for key, expected in recorded.items():
        _, kind, steps = key.split(".")
        close(sampling.schedule(kind, int(steps)), expected, 5e-5)


def test_mixing_distributions() -> None:
    recorded = {key: pi for key, pi in goldens.sampling("torch_steps")[1].items() if key.startswith("pi.")}
    assert len(recorded) == 20
    for key, expected in recorded.items():
        shift, log_snr = key.removeprefix("pi.nt").split(".ls")
        close(noise_of(float(shift)).pi(float(log_snr)), expected, 1e-7)
    assert noise_of(1000.0).pi(-9.0)[3] == 0


def test_the_share_of_uniform_tokens_in_the_initial_canvas() -> None:
    common = goldens.sampling("torch_steps")[0]
    for shift, expected in common["prior_uniform_probability_by_noise_type"].items():
        noise = noise_of(float(shift))
        assert 1 - float(noise.pi(-9.0)[noise.mask_id]) == pytest.approx(expected, abs=1e-7)


def test_filters() -> None:
    logits = goldens.sampling("torch_steps")[1]["filter.logits"]
    found = list(goldens.cases("torch_steps", "filter"))
    assert len(found) == 8
    for case, tensors in found:
        probabilities = sampling.filtered(logits, case["temperature"], case["top_k"], case["top_p"])
        close(probabilities, tensors["probs"], PROBABILITIES)


def test_adaptive_steps() -> None:
    found = list(goldens.cases("torch_steps", "adaptive"))
    assert len(found) == 36
    for case, tensors in found:
        z, logits = tensors["z"], tensors["logits"]
        scores = sampling.adaptive_scores(logits, z, noise_of(case["noise_type"]).pi(case["log_snr"]))
        close(scores, tensors["score"], SCORES)
        for row in range(len(z)):
            chosen = sampling.adaptive_selection(scores[row], case["n_tokens"])
            expected = {int(place) for place in tensors["pos"][row] if tensors["score"][row, place] > 0}
            assert set(chosen.nonzero()[:, 0].tolist()) == expected
            assert torch.equal(logits[row].argmax(-1).where(chosen, z[row]), tensors["z_next"][row])


def test_ancestral_steps() -> None:
    found = list(goldens.cases("torch_steps", "ancestral"))
    assert len(found) == 80
    for case, tensors in found:
        grid = sampling.schedule(case["schedule"], case["steps"])
        assert float(grid[case["i_t"]]) == pytest.approx(case["log_snr_t"], abs=1e-5)
        noise = noise_of(case["noise_type"])
        clean = sampling.filtered(tensors["logits"], case["temperature"], case["top_k"], case["top_p"])
        close(clean, tensors["x_hat"], PROBABILITIES)
        now, then = (sampling.mixture(noise, case[f"log_snr_{time}"]) for time in "ts")
        close(sampling.posterior(clean, tensors["z"], now, then), tensors["p_s_given_t"], PROBABILITIES)
