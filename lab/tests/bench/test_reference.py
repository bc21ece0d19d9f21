"""The loss of reference answers under a cache policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from remask import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.reference import (
    Reference,
    loss_differences,
    mean_loss,
    measure_losses,
    read_losses,
    reference_requests,
)
from remask_lab.bench.workload import usual_workload
from remask_lab.likelihood.masked import MaskedPasses
from remask_lab.likelihood.passes import Pair
from tests.checkpoint.checkpoints import FAST_DLLM_V2, LLADA2, SDAR, random_tensors, write
from tests.depth.models import with_ascii_tokenizer
from tests.goldens import model_dir

TEXTS = ("one two", "3", "four five six seven")


def opened(name: str, folder: Path) -> LLM:
    return LLM(str(with_ascii_tokenizer(model_dir(name), folder / name)), dtype="float32", device="cpu")


def references(llm: LLM, steps: int | None = None) -> list[Reference]:
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(text) for text in ("what is one?", "two plus one?", "and then?")]
    asked = llm.session.requests(prompts, SamplingParams(max_tokens=8, steps=steps))
    return [Reference(request, text) for request, text in zip(asked, TEXTS, strict=True)]


def log_probabilities(llm: LLM, known: list[Reference]) -> NDArray[np.float64]:
    """That of each reference with all of its tokens masked."""
    assert llm.tokenizer is not None
    texts = [llm.tokenizer.encode(each.text, add_special_tokens=False) for each in known]
    pairs = [Pair(each.request.prompt_token_ids, text) for each, text in zip(known, texts, strict=True)]
    masked = [(pair, np.ones(len(pair.response), dtype=np.bool_)) for pair in pairs]
    return MaskedPasses(llm, 4096).log_probabilities(masked)


def loss(llm: LLM, known: list[Reference], cache: str = "none", **settings: object) -> dict[str, Any]:
    return mean_loss(
        read_losses(
            llm,
            reference_requests(llm, known, llm.session.policy(cache, settings), 0),
            llm.session.engine_config,
            progress=False,
        )
    )


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_a_token_that_is_written_alone_has_the_loss_of_one_masked_pass(name: str, tmp_path: Path) -> None:
    """An estimator that runs no engine and no reader computes the same passes."""
    llm = opened(name, tmp_path)
    known = [Reference(each.request, text) for each, text in zip(references(llm), "3xz", strict=True)]
    expected = log_probabilities(llm, known)
    found = loss(llm, known)
    assert found["loss_tokens"] == 3
    assert found["loss"] == pytest.approx(-expected.mean(), rel=1e-4)


def test_tokens_that_are_written_at_once_have_the_loss_of_one_masked_pass(tmp_path: Path) -> None:
    llm = opened("llada", tmp_path)
    known = references(llm, steps=1)[:2]  # as many tokens a step as a whole response of eight has
    found = loss(llm, known)
    assert found["loss_tokens"] == 8
    assert found["loss"] == pytest.approx(-log_probabilities(llm, known).sum() / 8, rel=1e-4)


def test_a_cache_that_computes_everything_has_the_loss_of_none(tmp_path: Path) -> None:
    llm = opened("llada", tmp_path)
    known = references(llm)
    plain = loss(llm, known)
    assert plain == loss(llm, known), "the order is drawn from the seed"
    assert loss(llm, known, "dllm-cache", prompt_interval=1, response_interval=1)["loss"] == pytest.approx(
        plain["loss"]
    )
    assert loss(llm, references(llm, steps=1))["loss"] != plain["loss"], "tokens of one step do not see each other"


def test_a_cache_that_harms_answers_has_a_larger_loss() -> None:
    """The bundled model needs steps and a prefix that is read in the light of the question."""
    llm = LLM("bundled", dtype="float32", device="cpu")
    workload = usual_workload(llm, 6, 0, {}, prefixes=2)
    known = [Reference(task.request, task.reference or "") for task in workload.tasks]
    assert all(task.correct(task.reference) for task in workload.tasks)
    none, reuse = loss(llm, known), loss(llm, known, "reuse")
    assert none["loss_tokens"] == reuse["loss_tokens"] == 36
    assert loss(llm, known, "bicache", depth=0)["loss"] == pytest.approx(none["loss"], rel=1e-3)
    assert reuse["loss"] > none["loss"] + 1


@pytest.mark.parametrize("raw", [SDAR, FAST_DLLM_V2, LLADA2], ids=lambda raw: raw["model_type"])
def test_block_causal_models_write_block_by_block(raw: dict[str, Any], tmp_path: Path) -> None:
    wide = raw | {"vocab_size": 128, "mask_token_id": 120, "eos_token_id": 121, "max_position_embeddings": 128}
    folder = with_ascii_tokenizer(write(tmp_path / "raw", wide, random_tensors(wide)), tmp_path / "model")
    llm = LLM(str(folder), dtype="float32", device="cpu")
    known = references(llm)
    none = loss(llm, known)
    assert llm.tokenizer is not None
    assert none["loss_tokens"] == sum(len(llm.tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS)
    assert loss(llm, known, "exact")["loss"] == pytest.approx(none["loss"], rel=1e-4)


def test_the_same_canvases_are_read_beside_one_another() -> None:
    llm = LLM("bundled", dtype="float32", device="cpu")
    workload = usual_workload(llm, 6, 0, {}, prefixes=2)
    known = [Reference(task.request, task.reference or "") for task in workload.tasks]
    none, reuse, exact = (
        measure_losses(llm, known, llm.session.policy(*policy), 0)[0]
        for policy in (("none",), ("reuse",), ("bicache", {"depth": 0}))
    )
    clusters = {task.request.id: own for task, own in zip(workload.tasks, workload.clusters, strict=True)}
    assert loss_differences(exact, none, clusters)["pass_agreement"] == 1
    assert loss_differences(exact, none, clusters)["loss_over_none"] == pytest.approx(0, abs=1e-3)
    found = loss_differences(reuse, none, clusters)
    each = [reuse[name].nats.mean() - none[name].nats.mean() for name in none]
    assert found["loss_over_none"] == pytest.approx(float(np.mean(each)))
    assert found["loss_over_none_interval"][0] < found["loss_over_none"] < found["loss_over_none_interval"][1]
    assert found["pass_agreement"] < 1
    assert loss_differences({}, none, clusters) == {}


@pytest.mark.parametrize("cache", ["block-prefix", "block-dual", "dkv-decode"])
def test_every_token_is_predicted_where_rows_predict_the_next_position(cache: str, tmp_path: Path) -> None:
    """Of a block's first step these read the first position alone, so nothing else may be written in it."""
    llm = opened("dream", tmp_path)
    known = references(llm, steps=2)  # four tokens a step
    read, reason = measure_losses(llm, known, llm.session.policy(cache), 0)
    assert reason is None
    none = measure_losses(llm, known, llm.session.policy("none"), 0)[0]
    for name, own in read.items():
        assert np.isfinite(own.nats).all()
        assert own.nats.min() > 0.01, "a tiny random model is certain of nothing"
        assert own.nats[0] == pytest.approx(none[name].nats[0], rel=1e-4), "the first pass computes everything"


def test_what_has_no_loss_says_why(tmp_path: Path) -> None:
    llm = opened("llada", tmp_path)
    found, reason = measure_losses(llm, references(llm), llm.session.policy("dkv-greedy"), 0)
    assert mean_loss(found)["loss"] is None
    assert "use remasking 'random'" in (reason or "")
    uniform = LLM("bundled-uniform", dtype="float32", device="cpu")
    known = [Reference(task.request, task.reference or "") for task in usual_workload(uniform, 2, 0, {}).tasks]
    assert measure_losses(uniform, known, uniform.session.policy("none"), 0) == ({}, None)
