"""Establishes the block-causal oracle: dense passes, decodes and page hits against the recorded originals."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.goldens import block_causal as goldens
from tests.oracles import sdar
from tests.oracles.block_causal import decode
from tests.oracles.page_chain import Pool
from tests.oracles.recorded import EACH_DTYPE, close
from tests.oracles.sdar import SdarModel, block_causal
from tests.sampling_fields import ungrouped

CONFIDENCES = 1e-4
SHARES = 8  # of the runs of a model, so that several processes can take them


def golden_model(name: str, dtype: torch.dtype = torch.float64) -> SdarModel:
    return sdar.load(goldens.model_dir(name), dtype)


@EACH_DTYPE
@pytest.mark.parametrize("name", goldens.MODELS)
def test_dense_logits(name: str, dtype: torch.dtype) -> None:
    model, recorded = golden_model(name, dtype), goldens.logits(name)
    cases = [key.removesuffix(".logits") for key in recorded if key.endswith(".logits")]
    assert len(cases) >= 6
    assert model.block_length is not None
    for case in cases:
        out = model.forward(recorded[f"{case}.input_ids"], model.block_length)
        close(out.logits, recorded[f"{case}.logits"])


@pytest.mark.parametrize("name", goldens.MODELS)
def test_dense_states_and_kv(name: str) -> None:
    model, recorded = golden_model(name), goldens.logits(name)
    (case,) = (key.removesuffix(".k_cache") for key in recorded if key.endswith(".k_cache"))
    assert model.block_length is not None
    out = model.forward(recorded[f"{case}.input_ids"], model.block_length)
    close(out.states[:-1], recorded[f"{case}.hidden_states"][:-1])
    close(model.norm(out.states[-1], model.last_norm), recorded[f"{case}.hidden_states"][-1])
    close(out.kv.k.transpose(1, 2), recorded[f"{case}.k_cache"])
    close(out.kv.v.transpose(1, 2), recorded[f"{case}.v_cache"])


@pytest.mark.parametrize("name", goldens.RUN_LOGITS)
def test_logits_of_every_pass_of_a_run(name: str) -> None:
    """Prefill and commit passes included: the rows' logits given all that stands left of them."""
    model, recorded = golden_model(name), goldens.run_logits(name)
    run = next(run for run in goldens.runs(name) if run.id == goldens.RUN_LOGITS[name])
    passes = [key.removesuffix(".logits") for key in recorded if key.endswith(".logits")]
    assert len(passes) >= 10
    settled = [*run.prompt, *run.recorded["output_ids"]]
    for number in passes:
        first, rows = int(recorded[f"{number}.first_position"]), recorded[f"{number}.input_ids"]
        tokens = torch.cat([torch.tensor(settled[:first], dtype=torch.long), rows])
        out = model.forward(tokens, run.recorded["params"]["block_length"])
        close(out.logits[first:], recorded[f"{number}.logits"])


@pytest.mark.few(13)
@pytest.mark.parametrize("name", goldens.DECODED)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_run(name: str, share: int) -> None:
    model, runs = golden_model(name), goldens.runs(name)
    assert len(runs) == 203
    for run in runs[share::SHARES]:
        done, recorded = decode(model, ungrouped(run.request_line())), run.recorded
        assert done.output_ids == run.expected_ids(), run.id
        assert done.committed == [*run.prompt, *recorded["output_ids"]], run.id
        assert [transfer[1:] for transfer in done.transfers] == run.expected_transfers(), run.id
        assert [transfer[0] + 1 for transfer in done.transfers] == [event["fwd"] for event in recorded["transfers"]]
        assert done.kinds == recorded["kinds"], run.id
        assert [rows[0] for rows in done.rows] == recorded["rows_per_forward"], run.id
        for event, confidence, entropy in zip(recorded["transfers"], done.confidences, done.entropies, strict=True):
            assert confidence == pytest.approx(event["conf"], abs=CONFIDENCES)
            assert entropy == pytest.approx(event.get("ent", entropy), abs=CONFIDENCES)


@pytest.mark.parametrize("name", goldens.DECODED)
def test_page_hits_of_the_families(name: str) -> None:
    for family in goldens.families(name):
        for page_size in family.page_sizes:
            prompts, everything = Pool(page_size), Pool(page_size)
            for visit in family.visits:
                prompt, limit = visit.run.prompt, visit.prefill_length
                assert prompts.hit_tokens(prompt, limit) == visit.prompt_page_hits[page_size]
                assert everything.hit_tokens(prompt, limit) == visit.all_page_hits[page_size]
                prompts.publish(prompt[:limit])
                everything.publish([*prompt, *visit.run.recorded["output_ids"]])


def test_a_block_does_not_see_what_follows_it() -> None:
    model = golden_model("sdar_b4")
    tokens = torch.tensor(goldens.prompts()["p12"])
    full = model.forward(tokens, 4)
    for end in (4, 8, 16):
        part = model.forward(tokens[:end], 4)
        torch.testing.assert_close(part.kv.k, full.kv.k[:, :end])
        torch.testing.assert_close(part.logits, full.logits[:end])
    changed = tokens.clone()
    changed[7] += 1
    other = model.forward(changed, 4)
    torch.testing.assert_close(other.kv.k[:, :4], full.kv.k[:, :4])
    assert (other.kv.k[1:, 4:8] != full.kv.k[1:, 4:8]).flatten(2).any(-1).all(), "a token changes its whole block"


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_qwen3_under_a_block_causal_mask(tied: bool) -> None:
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    reference = Qwen3ForCausalLM(config)
    reference.requires_grad_(False)
    for weight in reference.parameters():
        weight.add_(torch.randn_like(weight) * 0.2)
    model = SdarModel(config.to_dict() | {"mask_token_id": 60, "rope_theta": 5000.0}, reference.state_dict())
    tokens = torch.randint(0, 60, (22,))
    for block_length in (1, 4, 5):
        hidden = torch.zeros(22, 22).masked_fill(~block_causal(22, block_length), torch.finfo(torch.float32).min)
        expected = reference(tokens[None], attention_mask=hidden[None, None], use_cache=False).logits[0]
        close(model.forward(tokens, block_length).logits, expected, 1e-4)
