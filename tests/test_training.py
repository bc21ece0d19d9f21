"""What training writes is what the engine reads: every family that `train_tariff.py` knows, with random weights."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from training import train_tariff, train_uniform, uniform_export
from training.export import export, load_weights
from training.mixture import Experts, Mixture
from training.model import Boundary, LocalHeads, MaskedModel, ModelShape, initialize
from training.tariff_data import RESPONSE_LENGTH, CanvasSource
from training.tariff_tokenizer import build_tokenizer, save_tokenizer
from training.uniform_data import Batch

from remask import LLM
from remask.checkpoint.load import read_config
from remask.engine.request import Request
from remask.plan.canvas import Canvas
from remask.request.sampling_params import SamplingParams
from remask.tasks.tariff import TariffSettings
from remask_lab.instruments.watch import Watcher
from remask_lab.likelihood.noised import Noised, NoiseDraws, NoiseLikelihoods
from remask_lab.likelihood.pairs import Pair
from remask_lab.likelihood.uncached_pass import Job, UncachedPasses

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
    policy = llm.policy("bicache", {"depth": depth, "refresh_interval": 1}) if depth else llm.policy("none", None)
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
    assert LLM(str(tmp_path / "m"), device="cpu").sampling["max_tokens"] == RESPONSE_LENGTH


def test_the_bound_is_what_the_likelihood_estimates(tmp_path: Path) -> None:
    """The same canvas at the same step: training's loss is the estimator's term a token, times the steps."""
    trainer = train_uniform.Trainer(0, 1024, 0.003, torch.device("cpu"), bound=True, precision=torch.float32)
    uniform_export.export(trainer.model, trainer.tokenizer, tmp_path / "model")
    llm = LLM(str(tmp_path / "model"), dtype="float32", device="cpu")
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            assert name
            parameter.copy_(parameter.half())  # as they were rounded
    batch = trainer.source.draw(6, 64)
    assert batch.steps is not None
    losses = []
    for row in range(6):
        one = Batch(*(tensor[row : row + 1] for tensor in (batch.tokens, batch.clean, batch.noisy, batch.window)))
        one = replace(one, steps=batch.steps[row : row + 1])
        with torch.no_grad():
            loss = trainer.loss(trainer.model(one.tokens, one.noisy, one.window), one)
        (places,) = one.window[0].nonzero(as_tuple=True)
        start, stop = int(places[0]), int(places[-1]) + 1
        pair = Pair(one.clean[0, :start].tolist(), one.clean[0, start:stop].tolist())
        noised = Noised(int(batch.steps[row]), one.tokens[0, start:stop].numpy(), one.tokens[0, stop:].numpy())
        (term,) = NoiseLikelihoods(llm, NoiseDraws(levels=train_uniform.LEVELS, canvas_length=64)).terms(pair, [noised])
        assert float(loss) == pytest.approx(train_uniform.LEVELS * term / (stop - start), rel=1e-3, abs=1e-4)
        losses.append(float(loss))
    assert len(set(losses)) == 6
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert np.isfinite(trainer.step(0.0))
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2


def test_uniform_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Two steps in one go are two steps in two, without structured attention and with mistakes."""

    def trainer() -> train_uniform.Trainer:
        return train_uniform.Trainer(
            3, 512, 0.003, torch.device("cpu"), structured=False, mistakes=True, precision=torch.float32
        )

    whole, part = trainer(), trainer()
    losses = [whole.step(0.0), whole.step(0.5)]
    assert part.step(0.0) == losses[0]
    part.save(tmp_path / "state")
    resumed = trainer()
    resumed.load(tmp_path / "state")
    assert resumed.step(0.5) == losses[1]
    assert (resumed.steps, resumed.tokens) == (whole.steps, whole.tokens)


def test_models_without_structured_attention_are_read_as_such(tmp_path: Path) -> None:
    trainer = train_uniform.Trainer(0, 512, 0.003, torch.device("cpu"), structured=False)
    uniform_export.export(trainer.model, trainer.tokenizer, tmp_path / "model")
    llm = LLM(str(tmp_path / "model"), dtype="float32", device="cpu")
    assert not llm.model.config.structured_attention
    assert LLM("bundled-uniform", dtype="float32", device="cpu").model.config.structured_attention
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.half())
        batch = trainer.source.draw(1, 64)
        logits = trainer.model(batch.tokens, batch.noisy, batch.window)
    start, stop = int(batch.window[0].nonzero()[0]), int(batch.window[0].nonzero()[-1]) + 1
    passes = UncachedPasses(llm)
    canvas = Canvas(batch.tokens[0, :start].tolist(), batch.tokens[0, start:].numpy(), stop - start)
    hidden = passes.hidden([Job(canvas, batch.window[0].numpy())])
    torch.testing.assert_close(llm.model.head(hidden), logits, rtol=2e-3, atol=2e-3)
