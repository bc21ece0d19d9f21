"""Depths by first predictions, against predictions of an engine that reads so many layers from its store."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remask.checkpoint.loaded import LoadedModel
from remask.depth import measure as measuring
from remask.depth.measure import measure
from remask.depth.requests import default_requests, read_system_prompt, readable_task
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from tests import goldens
from tests.depth.models import loaded, open_model, with_ascii_tokenizer, with_transit_tokenizer

LLADA = goldens.model_dir("llada")


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return open_model("llada-tiny", dummy=True)


def drawn(count: int, prefixes: int, canvas: int = 40, prefix: int = 32) -> list[Request]:
    """Requests over some prefixes."""
    params, found = SamplingParams(max_tokens=4), []
    for number in range(count):
        head = random.Random(f"head {number % prefixes}").choices(range(100), k=prefix)
        tail = random.Random(f"tail {number}").choices(range(100), k=canvas - prefix - 4)
        found.append(Request(str(number), [*head, *tail], params, prefix))
    return found


def moved_by(monkeypatch: pytest.MonkeyPatch, nats: dict[int, dict[int, float]]) -> list[tuple[int, int]]:
    """Lets first predictions move by so much, by length of prefix and depth. Returns what is asked for."""
    asked: list[tuple[int, int]] = []

    def moved(_passes: Any, _seen: Any, prefix: int, depths: Any) -> Any:
        for depth in depths:
            asked.append((prefix, depth))
            yield depth, nats[prefix].get(depth, 0.0)

    monkeypatch.setattr(measuring, "divergence_by_depth", moved)
    return asked


def test_what_moves_nothing_is_read_and_no_more_is_measured(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = moved_by(monkeypatch, {32: {}})
    table = measure(tiny.session, drawn(60, 60), "a test")
    assert (table.entries, table.source, table.layers) == ({80: 2}, "a test", 2)
    assert table.samples == 16, "audits that prove the depth"
    assert len(asked) < 3 * 60
    assert table.nats[80][2] == (0.0, 0.0, 0.0)


def test_a_depth_beyond_the_bound_is_not_read(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    moved_by(monkeypatch, {32: {2: 0.5}})
    table = measure(tiny.session, drawn(60, 60), "a test")
    assert table.entries == {80: 1}
    assert table.nats[80][2][0] == 0.5
    assert measure(tiny.session, drawn(60, 60), "a test", bound=0.6).entries == {80: 2}
    assert measure(tiny.session, drawn(8, 8), "a test").entries == {}, "too few"


def test_one_prefix_proves_its_own_depth(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of requests under one system prompt: the table holds for that."""
    moved_by(monkeypatch, {32: {2: 0.5}})
    table = measure(tiny.session, drawn(60, 1), "a test")
    assert table.entries == {80: 1}
    assert table.nats[80][1] == (0.0, 0.0, 0.0)


def test_a_lower_ratio_does_not_lend_its_depth_to_one_that_contradicts(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [each for pair in zip(drawn(60, 60), drawn(60, 60, prefix=22), strict=True) for each in pair]
    requests = [replace(each, id=str(number)) for number, each in enumerate(requests)]
    moved_by(monkeypatch, {32: {2: 0.5}, 22: {}})
    assert measure(tiny.session, requests, "a test").entries == {50: 1}
    moved_by(monkeypatch, {32: {}, 22: {2: 0.5}})
    assert measure(tiny.session, requests, "a test").entries == {50: 1, 80: 2}


def test_first_predictions_are_those_of_the_engine() -> None:
    """The tokens of a response of one step, whose layers read the store as deep, are the most probable ones."""
    llm = open_model(str(LLADA))
    layers = llm.loaded.config.layers
    (request,) = drawn(1, 1)
    request = replace(request, params=SamplingParams(max_tokens=4, steps=1, ignore_eos=True))
    passes, seen = llm.engine.auditor.passes, measuring.first_pass(llm.session, request)
    exact = passes.run_exact(seen)
    assert exact is not None
    moved = dict(measuring.divergence_by_depth(passes, seen, 32, range(1, layers + 1)))
    for depth in range(layers + 1):
        predicted = passes.run_reusing(seen, 32, depth) if depth else exact
        policy = llm.session.policy("bicache" if depth else "none", {"depth": depth} if depth else None)
        (output,) = llm.session.run([request.with_policy(policy)])
        assert predicted is not None
        best = llm.model.head(predicted).clone()
        best[:, llm.loaded.config.mask_id] = -torch.inf
        assert output.usage.prefix_depth == depth
        np.testing.assert_array_equal(best.argmax(-1).numpy(), output.token_ids)
        if depth:
            these, those = (llm.model.head(rows).double().log_softmax(-1) for rows in (exact, predicted))
            nats = (these.exp() * (these - those)).sum(-1).max()
            assert moved[depth] == pytest.approx(float(nats), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix_length": 0}, "request '0' has no shared prefix to measure"),
        ({"params": SamplingParams(max_tokens=4, cfg_scale=1.0)}, "cfg_scale=1: a guided request has two canvases"),
        ({"params": SamplingParams(max_tokens=64)}, "max_model_len"),
    ],
)
def test_requests_that_cannot_be(tiny: LLM, change: dict[str, Any], message: str) -> None:
    (request,) = drawn(1, 1)
    with pytest.raises(ConfigError, match=message):
        measure(tiny.session, [replace(request, **change)], "a test")


def test_only_masked_models_have_a_table() -> None:
    llm = open_model("sdar-tiny", dummy=True)
    with pytest.raises(ConfigError, match=r"runs on masked models; 'sdar-tiny' .* is block_causal"):
        measure(llm.session, drawn(1, 1), "a test")


@pytest.fixture(scope="module")
def ascii_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(str(with_ascii_tokenizer(LLADA, tmp_path_factory.mktemp("models") / "ascii")))


def test_requests_are_of_what_the_model_reads(ascii_model: LoadedModel, tmp_path: Path) -> None:
    transit = loaded(str(with_transit_tokenizer(LLADA, tmp_path / "transit")))
    plain = loaded(str(with_ascii_tokenizer(LLADA, tmp_path / "plain", None)))
    models = [ascii_model, plain, transit, loaded("bundled"), loaded("bundled-tariff"), loaded(str(LLADA))]
    assert [readable_task(each.tokenizer) for each in models] == ["town", "town", "transit", "relay", "tariff", None]
    for model in models:
        requests, source = default_requests(model, 3, 5)
        assert "seed 5" in source
        assert default_requests(model, 3, 5)[0] == requests != default_requests(model, 3, 6)[0]
        heads = {tuple(each.prompt_token_ids[: each.prefix_length]) for each in requests}
        assert len(heads) == len(requests) == 3, "each has a prefix of its own"
        assert all(0 < each.prefix_length < len(each.prompt_token_ids) for each in requests)


def test_all_under_one_system_prompt(ascii_model: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_system_prompt(file)
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no text"):
        read_system_prompt(file)
    file.write_text("Be brief.\n", encoding="utf-8")
    requests, source = default_requests(ascii_model, 3, 0, read_system_prompt(file))
    assert "under the given system prompt" in source
    (head,) = {tuple(each.prompt_token_ids[: each.prefix_length]) for each in requests}
    assert ascii_model.tokenizer is not None
    assert "Be brief." in ascii_model.tokenizer.decode(head)
    with pytest.raises(ConfigError, match="no tokenizer that reads texts"):
        default_requests(loaded(str(LLADA)), 3, 0, "Be brief.")
