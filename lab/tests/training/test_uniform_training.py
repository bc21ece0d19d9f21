"""The uniform model's training: what canvases hold, what losses are, and that the engine computes what was trained."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training import train_uniform, uniform_export
from training.relay_noise import TRAILING, NoisyBatch, NoisySource
from training.relay_tokenizer import build_tokenizer

from remask import LLM
from remask.plan.canvas import Canvas
from remask.tasks import relay
from remask.tasks.relay import HOPS, LEG, RelaySettings
from remask_lab.likelihood.passes import Job, UncachedPasses
from tests.oracles import bound

CONTEXT = 128
SMALL = ("--out", "x", "--canvas-tokens", "200", "--layers", "5")


def trainer(*more: str) -> train_uniform.Trainer:
    return train_uniform.Trainer(train_uniform.arguments([*SMALL, *more]))


def exported(made: train_uniform.Trainer, folder: Path) -> LLM:
    """What the engine makes of a model, whose weights are rounded as the files have them."""
    uniform_export.export(made.model, made.tokenizer, folder)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.copy_(parameter.half())
    return LLM(str(folder), dtype="float32", device="cpu")


@pytest.fixture
def source() -> NoisySource:
    return NoisySource(build_tokenizer(), 0, CONTEXT)


def spans(batch: NoisyBatch) -> Sequence[tuple[int, int]]:
    """Where each canvas' window begins and ends; it is one run of rows."""
    found = []
    for row in batch.window:
        (places,) = row.nonzero(as_tuple=True)
        found.append((int(places[0]), int(places[-1]) + 1))
        assert int(row.sum()) == found[-1][1] - found[-1][0]
    return found


def test_what_stands_before_the_window_is_clean_and_what_stands_behind_it_is_noise(source: NoisySource) -> None:
    lengths = set()
    for _ in range(12):
        batch = source.questions(8, RelaySettings(rows=8))
        length = batch.made.clean.shape[1]
        lengths.add(batch.tokens.shape[1] - length)
        for number, (start, stop) in enumerate(spans(batch)):
            assert length - HOPS <= start < stop == length
            assert batch.tokens[number, :start].equal(batch.made.clean[number, :start])
            assert batch.noisy[number].nonzero()[0] == start
            assert batch.noisy[number, start:].all()
        changed = batch.tokens[:, :length] != batch.made.clean
        assert not (changed & ~batch.wrong).any()
        assert (batch.wrong & batch.window).equal(batch.wrong)
        assert batch.wrong.any(1).all()
        assert not (batch.tokens == source.canvases.mask_id).any()
    assert 0 in lengths
    assert 0 < max(lengths) <= TRAILING
    longest = [source.leg(1, RelaySettings(legs=2), 0).tokens.shape[1] for _ in range(40)]
    assert min(longest) < max(longest) <= CONTEXT


def test_wrong_tokens_are_noise_or_towns(source: NoisySource) -> None:
    batch = source.questions(64, RelaySettings(rows=8))
    tokenizer = build_tokenizer()
    towns = {tokenizer.convert_tokens_to_ids(f" {town}") for town in relay.TOWNS}
    wrong = [set(tokens[rows].tolist()) for tokens, rows in zip(batch.tokens, batch.wrong, strict=False)]
    mistaken = [found <= towns for found in wrong]
    assert 0.1 < sum(mistaken) / len(mistaken) < 0.6


@pytest.mark.parametrize("number", [0, 1])
def test_a_leg_is_asked_in_its_own_season(source: NoisySource, number: int) -> None:
    batch = source.leg(8, RelaySettings(rows=8, legs=2), number)
    length = batch.made.clean.shape[1]
    assert batch.made.seasons is not None
    tokenizer = build_tokenizer()
    for canvas, season, (start, stop) in zip(batch.made.clean, batch.made.seasons, spans(batch), strict=True):
        assert (start, stop) == (length - HOPS + number * LEG, length - HOPS + (number + 1) * LEG)
        told = str(tokenizer.decode(canvas)).split("In ")[1].split(":")[0].split(", ")
        assert told[number] == relay.SEASONS[season]
    behind = batch.tokens[:, length - HOPS + (number + 1) * LEG : length]
    assert behind.shape[1] == (1 - number) * LEG


@pytest.mark.thorough
def test_every_loss_moves_the_model() -> None:
    for options in ((), ("--loss", "bound"), ("--attention", "full")):
        made = trainer(*options)
        for stage in (0, 0, 1, 2):
            made.stage = stage
            before = [parameter.clone() for parameter in made.model.parameters()]
            made.step()
            moved = [not torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True)]
            assert sum(moved) > len(moved) / 2
            assert all(bool(parameter.isfinite().all()) for parameter in made.model.parameters())


def test_the_loss_is_the_bound_of_what_the_engine_predicts(tmp_path: Path) -> None:
    """The same canvas at the same step: training's loss is the enumerated term a token, times the steps."""
    made = trainer("--loss", "bound")
    llm = exported(made, tmp_path / "model")
    noise, batch = made.noise, made.source.questions(2, RelaySettings(rows=8))
    assert batch.steps is not None
    exact = bound.chain(train_uniform.LEVELS, noise.shift, noise.vocab, noise.mask_id, -9.0, 9.0)
    length = batch.made.clean.shape[1]
    start, losses = length - HOPS, []
    for row in range(2):
        clean, tokens = batch.made.clean[row], batch.tokens[row]
        one = replace(
            batch,
            **{name: getattr(batch, name)[row : row + 1] for name in ("tokens", "noisy", "window", "wrong", "steps")},
            made=replace(batch.made, clean=clean[None]),
        )
        with torch.no_grad():
            loss, hop = made.loss(one)
        assert hop is None
        logits = predicted(llm, tokens, start, length, structured=True).clone()
        logits[:, noise.mask_id] = -torch.inf
        response, noisy = clean[start:].tolist(), tokens[start:length].tolist()
        term = bound.step_divergence(exact, int(batch.steps[row]), response, noisy, logits.double().softmax(-1).numpy())
        assert float(loss) == pytest.approx(train_uniform.LEVELS * term / HOPS, rel=1e-3, abs=1e-4)
        losses.append(float(loss))
    assert len(set(losses)) == 2


def predicted(llm: LLM, tokens: torch.Tensor, start: int, stop: int, *, structured: bool) -> torch.Tensor:
    """The engine's logits of the positions from `start` to `stop` of a canvas, [stop - start, V]."""
    canvas = Canvas(tokens[:start].tolist(), tokens[start:].numpy(), stop - start)
    place = np.arange(len(tokens))
    sees = np.where(place < start, start, len(place)) if structured else None
    hidden = UncachedPasses(llm).hidden([Job(canvas, (place >= start) & (place < stop), sees)])
    return llm.model.head(hidden)


@pytest.mark.parametrize("attention", ["structured", "full"])
def test_the_engine_computes_what_was_trained(attention: str, tmp_path: Path) -> None:
    made = trainer("--attention", attention)
    llm = exported(made, tmp_path / "model")
    assert llm.model.config.structured_attention == (attention == "structured")
    assert llm.session.sampling.items() >= relay.UNIFORM_SAMPLING.items()
    batch = made.source.leg(1, RelaySettings(rows=8, legs=2), 1)
    ((start, stop),) = spans(batch)
    with torch.no_grad():
        logits = made.model.head(made.model.states(batch.tokens, batch.noisy)[-1][0, start:stop])
    found = predicted(llm, batch.tokens[0], start, stop, structured=attention == "structured")
    torch.testing.assert_close(found, logits, rtol=2e-3, atol=2e-3)


def test_training_begins_from_an_exported_model(tmp_path: Path) -> None:
    made = trainer()
    exported(made, tmp_path / "model")
    again = trainer("--seed", "5", "--start", str(tmp_path / "model"))
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), again.model.parameters(), strict=True))
    assert again.stage == len(train_uniform.STAGES) - 1


def test_the_script_trains_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", print)  # the other tests keep theirs
    train_uniform.main([*SMALL, "--steps", "2", "--questions", "1", "--out", str(tmp_path / "m")])
    told = capsys.readouterr().out
    assert "6 tokens a step: {1: 0.0, " in told
    assert "leg 1: 0.0" in told
    (request,) = relay.make_workload(1, 1, 0)
    llm = LLM(str(tmp_path / "m"), dtype="float32", device="cpu")
    (output,) = llm.generate([request.messages], {"ignore_eos": True})
    assert len(output.token_ids) == HOPS
