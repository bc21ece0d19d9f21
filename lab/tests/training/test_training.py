"""What training writes is what the engine reads: every family that `train_tariff.py` knows, with random weights."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from training import train_tariff
from training.export import export, load_weights
from training.mixture import Experts, Mixture
from training.model import Boundary, LocalHeads, MaskedModel, ModelShape, initialize
from training.tariff_data import RESPONSE_LENGTH, CanvasSource
from training.tariff_tokenizer import build_tokenizer, save_tokenizer

from remask import LLM
from remask.checkpoint.load import read_config
from remask.engine.request import Request
from remask.request.sampling_params import SamplingParams
from remask.tasks.tariff import TariffSettings
from remask_lab.instruments.watch import Watcher

Family = Literal["llada", "dream", "llada-moe"]
FAMILIES: tuple[Family, ...] = ("llada", "dream", "llada-moe")
EXPERTS = Experts(count=5, active=2, hidden=24)


def made(family: Family, folder: Path, scale: float = 8.0) -> tuple[MaskedModel, LLM]:
    """A model of random weights, and what the engine makes of its folder."""
    torch.manual_seed(3)
    tokenizer = build_tokenizer()
    shape = ModelShape(
        len(tokenizer),
        d_model=48,
        n_layers=3,
        n_heads=4,
        mlp_hidden_size=40,
        embedding_scale=scale,
        family=family,
        experts=EXPERTS if family == "llada-moe" else None,
    )
    model = MaskedModel(shape)
    initialize(model, LocalHeads((-2, -1, 1, 2)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    export(model, tokenizer, folder, {"max_tokens": 8})
    save_tokenizer(folder)
    load_weights(model, folder)  # as they were rounded
    return model, LLM(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("depth", [0, 2])
def test_the_engine_computes_what_was_trained(family: Family, scale: float, depth: int, tmp_path: Path) -> None:
    model, llm = made(family, tmp_path / "model", scale)
    _, config = read_config(tmp_path / "model")
    assert (config.family, config.shift) == (family, model.shape.shift)
    prefix, prompt = list(range(300, 311)), list(range(300, 317))
    canvas = torch.tensor([prompt + [config.mask_id] * 6])
    boundary = Boundary(len(prefix), torch.tensor([depth]))
    positions = torch.zeros_like(canvas, dtype=torch.bool)
    positions[:, len(prompt) :] = True
    with torch.no_grad():
        expected = model(canvas, model.predicting(positions), boundary)
    found: list[torch.Tensor] = []
    watcher = Watcher(llm)
    policy = (
        llm.session.policy("bicache", {"depth": depth, "refresh_interval": 1})
        if depth
        else llm.session.policy("none", None)
    )
    params = SamplingParams(max_tokens=6, block_length=6, steps=6)
    watcher.run(
        Request("r", prompt, params, len(prefix), policy=policy),
        lambda seen: found.append(watcher.engine.model.head(seen.hidden).clone()),
    )
    # A prefix that is read alone in the layers up to the depth is what BiCache computes at R = 1.
    torch.testing.assert_close(found[0], expected, atol=5e-4, rtol=5e-4)


def test_experts_are_grouped_as_one_by_one() -> None:
    torch.manual_seed(0)
    mixture = Mixture(12, EXPERTS)
    rows = torch.randn(2, 7, 12)
    out = mixture(rows)
    for row, found in zip(rows.view(-1, 12), out.view(-1, 12), strict=True):
        scores = mixture.router(row).softmax(-1)
        best = sorted(range(5), key=lambda number: -scores[number].item())[:2]
        torch.testing.assert_close(found, sum(scores[number] * mixture.experts[number](row) for number in best))
    assert 1 <= mixture.imbalance.item() < 2


def test_imbalance_is_one_where_experts_are_used_alike_and_grows_to_their_number() -> None:
    mixture = Mixture(4, Experts(count=4, active=1, hidden=3))
    with torch.no_grad():
        mixture.router.weight.copy_(50 * torch.eye(4))
    mixture(torch.eye(4))
    assert mixture.imbalance.item() == pytest.approx(1.0, abs=1e-4)
    mixture(torch.eye(4)[:1].expand(4, 4))
    assert mixture.imbalance.item() == pytest.approx(4.0, abs=1e-4)


@pytest.mark.parametrize("shift", [0, 1])
def test_no_canvas_masks_what_no_row_predicts(shift: int) -> None:
    source = CanvasSource(build_tokenizer(), 0, shift)
    batch = source.prefixes(8, TariffSettings(orders=8))
    assert not batch.masked[:, :shift].any()
    assert batch.masked[:, shift].all()
    assert (batch.noisy != batch.clean).equal(batch.masked)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_script_trains_and_exports_each_family(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--steps", "2", "--questions", "1", "--canvas-tokens", "200", "--layers", "3", "--depths", "0,1"]
    monkeypatch.setattr("sys.argv", ["train_tariff.py", *small, "--family", family, "--out", str(tmp_path / "m")])
    monkeypatch.setattr(torch, "set_num_threads", print)  # the other tests keep theirs
    train_tariff.main()
    told = capsys.readouterr().out
    assert "plan at depths [0, 1, 2, 3]" in told
    assert "lookup at depths" in told
    _, config = read_config(tmp_path / "m")
    assert config.family == family
    assert LLM(str(tmp_path / "m"), device="cpu").session.sampling["max_tokens"] == RESPONSE_LENGTH
