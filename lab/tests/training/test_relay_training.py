"""Canvases of the graded model's training: what is masked, what is known, and what auxiliary losses are told."""

from pathlib import Path

import pytest
import torch
from training import train_graded
from training.model import MaskedModel
from training.relay_data import START, CanvasSource
from training.relay_tokenizer import build_tokenizer

from remask import LLM
from remask.tasks import relay
from remask.tasks.relay import HOPS, RelaySettings


@pytest.fixture
def source() -> CanvasSource:
    return CanvasSource(build_tokenizer(), 0)


def words(tokens: torch.Tensor) -> list[str]:
    """The words of these tokens, without the spaces before them."""
    return [str(build_tokenizer().decode([token])).strip() for token in tokens.tolist()]


def test_only_responses_are_masked_and_the_rest_is_whole(source: CanvasSource) -> None:
    batch = source.questions(32, RelaySettings())
    assert batch.masked[:, -HOPS:].any(1).all()
    assert not batch.masked[:, :-HOPS].any()
    assert (batch.noisy != batch.clean).equal(batch.masked)
    assert (batch.noisy[batch.masked] == source.mask_id).all()


def test_a_masked_town_is_known_where_the_town_before_it_stands(source: CanvasSource) -> None:
    batch = source.questions(64, RelaySettings(rows=8, seasons=1))
    assert batch.known is not None
    masked, known = batch.masked[:, -HOPS:], batch.known[:, -HOPS:]
    assert known[:, 0].equal(masked[:, 0]), "the question says where the first hop starts"
    assert known[:, 1:].equal(masked[:, 1:] & ~masked[:, :-1])
    assert known.any(1).all()
    assert not known[masked].all()


def test_what_auxiliary_losses_are_told_is_what_the_texts_say(source: CanvasSource) -> None:
    batch = source.questions(6, RelaySettings())
    assert batch.seasons is not None
    assert batch.shippers is not None
    assert batch.origins is not None
    for canvas, season, shippers, origins in zip(
        batch.clean, batch.seasons, batch.shippers, batch.origins, strict=True
    ):
        start, route = words(canvas[START - HOPS][None]), words(canvas[-HOPS:])
        assert [relay.TOWNS[town] for town in origins] == [*start, *route[:-1]]
        goods, towns = words(canvas[batch.towns - 1]), words(canvas[batch.towns])
        assert [relay.TOWNS[town] for town in shippers] == [relay.shipper(relay.SEASONS[season], g) for g in goods]
        hops = {relay.TOWNS[ship]: town for ship, town in zip(shippers, towns, strict=True)}
        assert [hops[town] for town in [*start, *route[:-1]]] == route


def test_prefixes_are_system_prompts_alone(source: CanvasSource) -> None:
    batch = source.prefixes(4, RelaySettings(rows=8))
    assert batch.prefix == batch.clean.shape[1]
    assert batch.known is None
    assert 0 < batch.masked.float().mean() < 0.7
    assert (batch.noisy != batch.clean).equal(batch.masked)


def test_recitations_repeat_the_rows(source: CanvasSource) -> None:
    batch = source.recitations(4, 8)
    for canvas, masked in zip(batch.clean, batch.masked, strict=True):
        rows = dict(zip(words(canvas[batch.towns - 1]), words(canvas[batch.towns]), strict=True))
        said = words(canvas[-16:])
        assert dict(zip(said[::2], said[1::2], strict=True)) == rows
        assert not masked[:-16].any()
        assert not masked[-16::2].any()


def test_every_row_attends_to_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache's mask takes part in training."""
    given: list[object] = []
    states = MaskedModel.states

    def spy(self: MaskedModel, tokens: torch.Tensor, boundary: object = None) -> list[torch.Tensor]:
        given.append(boundary)
        return states(self, tokens)

    monkeypatch.setattr(MaskedModel, "states", spy)
    trainer = train_graded.Trainer(train_graded.arguments(["--out", "x", "--canvas-tokens", "200"]))
    for stage in (0, 0, 1, 2):
        trainer.stage = stage
        trainer.step()
    assert given == [None] * 4


def test_the_script_trains_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--steps", "2", "--questions", "1", "--canvas-tokens", "200", "--layers", "4", "--depths", "0,1,2"]
    monkeypatch.setattr(torch, "set_num_threads", print)  # the other tests keep theirs
    train_graded.main([*small, "--out", str(tmp_path / "m")])
    assert "right at depths {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}" in capsys.readouterr().out
    llm = LLM(str(tmp_path / "m"), dtype="float32", device="cpu")
    assert llm.session.sampling.items() >= relay.SAMPLING.items()
    (request,) = relay.make_workload(1, 1, 0)
    (output,) = llm.generate([request.messages])
    assert len(output.token_ids) == HOPS
