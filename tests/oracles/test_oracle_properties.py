"""What must hold for the oracles' variants of which no original was recorded."""

from typing import Any, Literal

import pytest
import torch

from tests import goldens
from tests.oracles.bicache import Lease, refresh_pass
from tests.oracles.canvas import Canvas, Decode
from tests.oracles.decode import decode
from tests.oracles.dense import DenseModel, load

Boundary = Literal["stored", "recomputed"]
FAMILIES = ("llada_gqa", "dream")
BOUNDARIES: tuple[Boundary, ...] = ("stored", "recomputed")


def golden_model(name: str) -> DenseModel:
    return load(goldens.model_dir(name))


def ask(
    model: DenseModel,
    cache: str,
    config: dict[str, Any],
    prefix: int = 12,
    boundary: Boundary = "stored",
    **sampling: Any,
) -> Decode:
    remasking = "maskgit_plus" if model.dream else "low_confidence"
    line = {
        "prompt_token_ids": goldens.prompts()["p03"],
        "prefix_length": prefix,
        "cache": cache,
        "cache_config": config,
        "sampling": {"max_tokens": 8, "steps": 8, "remasking": remasking} | sampling,
    }
    return decode(model, line, boundary)


@pytest.mark.parametrize("name", FAMILIES)
def test_partial_passes_with_exact_kv_equal_the_full_pass(name: str) -> None:
    model = golden_model(name)
    tokens = torch.tensor(goldens.prompts()["p03"])
    full = model.forward(tokens)
    rows = torch.arange(len(tokens)) % 3 == 1
    part = model.forward(tokens, rows, full.kv.only(~rows))
    torch.testing.assert_close(part.logits[rows], full.logits[rows])
    torch.testing.assert_close(part.kv.k, full.kv.k)
    assert part.logits[~rows].isnan().all()
    assert part.rows == [int(rows.sum())] * model.layers


def test_reading_what_nobody_computed_fails() -> None:
    model = golden_model("llada_gqa")
    tokens = torch.tensor(goldens.prompts()["p03"])
    rows = torch.arange(len(tokens)) > 3
    with pytest.raises(ValueError, match="nobody computed"):
        model.forward(tokens, rows)
    with pytest.raises(ValueError, match="nobody computed"):
        model.forward(tokens, rows, model.forward(tokens).kv.below(2))


def test_keys_are_rotated_by_absolute_position() -> None:
    model = golden_model("llada_gqa")
    kv = model.forward(torch.tensor(goldens.prompts()["p03"])).kv
    rotated = model.rotated_keys(kv)
    torch.testing.assert_close(rotated[:, 0], kv.k[:, 0])
    torch.testing.assert_close(rotated.norm(dim=-1), kv.k.norm(dim=-1))
    torch.testing.assert_close(model.rotate(kv.k[1, 5:7], torch.tensor([5, 6])), rotated[1, 5:7])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_refresh_from_an_exact_lease_equals_the_full_pass(name: str, boundary: Boundary, depth: int) -> None:
    model = golden_model(name)
    canvas = Canvas(goldens.prompts()["p03"], 8, model.mask_id)
    full = model.forward(canvas.tokens)
    suffix = canvas.span(10, canvas.length)
    exact = Lease(~suffix, full.kv.only(~suffix), full.states)
    out = refresh_pass(model, canvas, exact, depth, suffix, model.empty_kv(canvas.length), boundary)
    torch.testing.assert_close(out.logits, full.logits)
    torch.testing.assert_close(out.kv.v, full.kv.v)
    shallow = canvas.length if boundary == "recomputed" else int(suffix.sum())
    assert out.rows == [shallow] * depth + [canvas.length] * (model.layers - depth)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_depth_0_refreshed_always_and_an_empty_prefix_cache_nothing(name: str, boundary: Boundary) -> None:
    model = golden_model(name)
    plain = ask(model, "none", {})
    assert ask(model, "bicache", {"depth": 0, "refresh_interval": 1}, boundary=boundary) == plain
    assert ask(model, "bicache", {"depth": 2, "refresh_interval": 3}, prefix=0, boundary=boundary) == plain


@pytest.mark.parametrize("name", FAMILIES)
def test_full_depth_is_reuse_whatever_the_boundary_and_interval(name: str) -> None:
    model = golden_model(name)
    reused = ask(model, "reuse", {})
    for boundary in BOUNDARIES:
        config = {"depth": model.layers, "refresh_interval": 2}
        assert ask(model, "bicache", config, boundary=boundary) == reused


def test_the_boundary_matters_and_costs_rows_on_refreshes_only() -> None:
    model = golden_model("llada_gqa")
    config = {"depth": 2, "refresh_interval": 4}
    stored, recomputed = (ask(model, "bicache", config, boundary=boundary) for boundary in BOUNDARIES)
    assert stored.output_ids != recomputed.output_ids
    refreshes, prefix_rows, shallow_layers = 2, 12, 2
    assert recomputed.row_layers - stored.row_layers == refreshes * prefix_rows * shallow_layers


def test_dream_keeps_its_last_prompt_row_live() -> None:
    model = golden_model("dream")
    prompt = len(goldens.prompts()["p03"])
    whole = ask(model, "reuse", {}, prefix=prompt)
    assert whole == ask(model, "reuse", {}, prefix=prompt - 1)
    assert whole.rows[0] == [8 + 1] * model.layers


def test_bicache_block_dual_without_depth_in_one_block_is_block_dual() -> None:
    model = golden_model("llada_gqa")
    config = {"depth": 0, "refresh_interval": None, "fill_pass": "transfer"}
    for rule in ({"steps": 8}, {"threshold": 0.4}):
        assert ask(model, "bicache+block-dual", config, **rule) == ask(model, "block-dual", {}, **rule)


def test_a_separate_fill_pass_costs_one_pass_a_block() -> None:
    model = golden_model("llada_gqa")
    config = {"depth": 2, "refresh_interval": 2, "fill_pass": "separate"}
    assert ask(model, "bicache+block-dual", config, block_length=4).forwards == 8 + 2
    assert ask(model, "bicache+block-dual", config | {"fill_pass": "transfer"}, block_length=4).forwards == 8


@pytest.mark.parametrize(
    ("cache", "config"), [("dkv-decode", {"refresh_interval": 1}), ("dllm-cache", {"prompt_interval": 1})]
)
def test_always_refreshing_equals_no_cache(cache: str, config: dict[str, Any]) -> None:
    model = golden_model("llada_gqa")
    always = {"response_interval": 1, "ratio": 0.0} | config
    assert ask(model, cache, always, block_length=4) == ask(model, "none", {}, block_length=4)
