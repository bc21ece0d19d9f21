"""Establishes the oracles: dense passes, decoders, similarities and tables against the recorded originals."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests import goldens
from tests.oracles import similarity
from tests.oracles.bicache import lease, refresh_pass
from tests.oracles.canvas import Canvas
from tests.oracles.decode import decode
from tests.oracles.dense import DenseModel, load
from tests.oracles.recorded import EACH_DTYPE, close
from tests.sampling_fields import ungrouped

STRIDE = 7
UNASKABLE = "fast_dllm_dual_without_bicache_engine"


def spread() -> list[goldens.Run]:
    """Of each method of each file every seventh run, and every run that brings a parameter value not seen before."""
    chosen = []
    for file in goldens.run_files():
        count: Counter[str] = Counter()
        seen: set[tuple[Any, ...]] = set()
        for run in goldens.runs(file):
            if run["method"] == UNASKABLE or "tokens" in goldens.exempt(run):
                continue
            values = {(run["method"], *item) for item in run["params"].items()}
            if count[run["method"]] % STRIDE == 0 or not values <= seen:
                chosen.append(run)
                seen |= values
            count[run["method"]] += 1
    return chosen


def golden_model(name: str, dtype: torch.dtype = torch.float64) -> DenseModel:
    return load(goldens.model_dir(name), dtype)


@EACH_DTYPE
@pytest.mark.parametrize("name", goldens.MODELS)
def test_dense_logits(name: str, dtype: torch.dtype) -> None:
    model, recorded = golden_model(name, dtype), goldens.tensors(name)
    cases = [key.removesuffix(".input_ids") for key in recorded if key.endswith(".input_ids")]
    assert len(cases) >= 4
    for case in cases:
        out = model.forward(recorded[f"{case}.input_ids"][0])
        close(out.logits, recorded[f"{case}.logits_unshifted" if model.dream else f"{case}.logits"][0])


@pytest.mark.parametrize("name", goldens.MODELS)
def test_dense_states_and_kv(name: str) -> None:
    model, recorded = golden_model(name), goldens.tensors(name)
    out = model.forward(recorded["p00.all_masked.input_ids"][0])
    close(out.states[:-1], recorded["p00.all_masked.hidden_states"][:-1])
    close(model.norm(out.states[-1], model.last_norm), recorded["p00.all_masked.hidden_states"][-1])
    if not model.dream:
        close(out.kv.k.transpose(1, 2), recorded["p00.all_masked.k_pre_rope"])
        close(out.kv.v.transpose(1, 2), recorded["p00.all_masked.v"])


def test_prefix_only_pass_and_bicache_steps() -> None:
    model, recorded = golden_model("llada"), goldens.tensors("bicache_tensors")
    for name, ids in goldens.prompts().items():
        if name.startswith("s"):
            prefix = next(run["prefix_len"] for run in goldens.runs("llada_bicache", {"bicache"}) if _of(run, name))
            close(model.forward(torch.tensor(ids[:prefix])).logits[-1:], recorded[f"{name}.prefix_only_logits_last"])

    canvas = Canvas(goldens.prompts()["s0a"], 16, model.mask_id)
    prefix = recorded["s0a.inter.k"].shape[2]
    leased = lease(model, canvas, prefix)
    close(leased.kv.k[:, :prefix].transpose(1, 2), recorded["s0a.inter.k"])
    close(leased.kv.v[:, :prefix].transpose(1, 2), recorded["s0a.inter.v"])
    close(leased.states[1:, :prefix], recorded["s0a.inter.o"])

    suffix = canvas.span(prefix, canvas.length)
    for step in range(6):
        canvas.tokens = recorded[f"s0a.b2.interval4.step{step}.input_ids"][0]
        if step % 4 == 0:
            out = refresh_pass(model, canvas, leased, 2, suffix, model.empty_kv(canvas.length), "stored")
            saved = out.kv.only(~suffix)
        else:
            out = model.forward(canvas.tokens, suffix, saved)
        close(out.logits[suffix], recorded[f"s0a.b2.interval4.step{step}.logits_suffix_rows"][0])


def _of(run: goldens.Run, prompt: str) -> bool:
    return bool(run["prompt_id"] == prompt)


@pytest.mark.few(31)
@pytest.mark.parametrize("run", spread(), ids=goldens.run_id)
def test_decoder(run: goldens.Run) -> None:
    model = golden_model(run["model"])
    decoded = decode(model, ungrouped(goldens.request_line(run, goldens.run_id(run))))
    exempt, expected = goldens.exempt(run), goldens.transfers(run)
    assert [transfer[1:] for transfer in decoded.transfers] == [transfer[1:] for transfer in expected]
    assert decoded.output_ids == run["output_ids"]
    if "passes" not in exempt:
        assert [transfer[0] + 1 for transfer in decoded.transfers] == [transfer[0] for transfer in expected]
    if "forwards" not in exempt:
        assert decoded.forwards == goldens.expected_forwards(run)
    # Where Fast-dLLM ran no idle pass its rows are comparable as well.
    if "row_layers" not in exempt or run["nfe"] == run.get("nfe_active"):
        assert decoded.row_layers == goldens.row_layers(run, model.layers)
    if "refresh_indices" in run:
        assert [[number + 1, layer, rows] for number, layer, rows in decoded.picks] == run["refresh_indices"]


def test_similarities() -> None:
    model, ids = golden_model("llada"), goldens.prompts()
    for name, pair in goldens.profiler()["pairs"].items():
        found = similarity.similarities(model, ids[name], pair["prefix_len"])
        assert len(ids[name]) == pair["seq_len"]
        for definition, values in found.items():
            assert values == pytest.approx(pair[definition], abs=1e-5), (name, definition)
        assert similarity.ratio(pair["prefix_len"], pair["seq_len"]) == pair["profiler_ratio"]
        assert similarity.ratio(pair["prefix_len"], pair["seq_len"] + 16) == pair["engine_ratio"]


def test_depth_tables() -> None:
    for case in goldens.profiler()["table_cases"]:
        for threshold, expected in case["by_threshold"].items():
            table = similarity.depth_table(dict(enumerate(case["similarity"])), float(threshold))
            assert table == {int(key): depth for key, depth in expected["table"].items()}
            for key, depth in expected["lookup"].items():
                assert similarity.depth_for(table, int(key)) == (depth or 0)


def test_ratios() -> None:
    for case in goldens.profiler()["ratio_cases"]:
        assert similarity.ratio(case["prefix_len"], case["seq_len"]) == case["ratio"]


def test_bins_hold_the_mean_of_their_samples() -> None:
    assert similarity.mean_by_ratio([(60, [1.0, 0.5]), (40, [1.0, 0.2]), (60, [0.0, 1.0])]) == {
        40: [1.0, 0.2],
        60: [0.5, 0.75],
    }
