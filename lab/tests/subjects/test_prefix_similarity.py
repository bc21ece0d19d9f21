"""Similarity of a shared prefix over layers and steps, against dense float64 passes over the same canvases."""

import numpy as np
import pytest
import torch
from lab.tests.subjects.support import canvases
from numpy.typing import NDArray

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.similarity.probe import Measure, PrefixProbe
from remask_lab.subjects.prefix_similarity import measure_prefix, summarise
from tests import goldens
from tests.depth.models import open_model
from tests.goldens import uniform
from tests.oracles import similarity
from tests.oracles.dense import DenseModel, load

PREFIX = 20


def requests(llm: LLM, count: int = 2) -> list[Request]:
    params = SamplingParams(max_tokens=8, steps=4, ignore_eos=True)
    limit = llm.model.config.vocab
    prompts = [[token % limit for token in goldens.prompts()[name]] for name in ("s0a", "s0b")[:count]]
    return [Request(str(i), prompt, params, PREFIX) for i, prompt in enumerate(prompts)]


def dense_similarity(model: DenseModel, canvas: torch.Tensor, measure: Measure) -> NDArray[np.float64]:
    """[2, layers], K first."""
    found = similarity.similarities(model, canvas.tolist(), PREFIX)
    names = ("flat_cosine_k", "flat_cosine_v") if measure == "flat" else ("mean_token_cosine_k", "mean_token_cosine_v")
    return np.array([found[name] for name in names])


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["llada", "llada_gqa", "dream"])
@pytest.mark.parametrize("measure", ["flat", "official"])
def test_every_step_is_like_a_dense_pass(name: str, measure: Measure) -> None:
    folder = goldens.model_dir(name)
    llm = open_model(str(folder))
    work, model = requests(llm), load(folder)
    report = measure_prefix(llm, work, 0.9, measure)
    passes = [canvases(llm, request, cache="none") for request in work]
    expected = np.stack([np.stack([dense_similarity(model, each, measure) for each in own], axis=-1) for own in passes])
    np.testing.assert_allclose(report.k, expected[:, 0].mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(report.v, expected[:, 1].mean(axis=0), atol=1e-5)
    both = expected.mean(axis=1)
    np.testing.assert_allclose(report.similarity, both.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(report.over_steps, both.mean(axis=0).std(axis=1), atol=1e-5)
    np.testing.assert_allclose(report.over_requests, both.mean(axis=2).std(axis=0), atol=1e-5)
    assert (report.requests, report.steps, report.prefix_tokens) == (2, 4, PREFIX)


def test_the_first_step_is_what_the_profiler_measures() -> None:
    llm = open_model(str(goldens.model_dir("llada")))
    (request,) = requests(llm, 1)
    report = measure_prefix(llm, [request])
    probed = PrefixProbe(llm.model, 64).similarity(request.prompt_token_ids, 8, PREFIX)
    np.testing.assert_allclose(np.array(report.k)[:, 0], probed[0], atol=1e-6)
    np.testing.assert_allclose(np.array(report.v)[:, 0], probed[1], atol=1e-6)


def test_a_prefix_that_is_the_whole_prompt_leaves_the_row_that_predicts() -> None:
    llm = open_model(str(goldens.model_dir("dream")))
    (request,) = requests(llm, 1)
    whole = Request("0", request.prompt_token_ids, request.params, len(request.prompt_token_ids))
    assert measure_prefix(llm, [whole]).prefix_tokens == len(request.prompt_token_ids) - 1


def test_depth_is_where_all_steps_stay_above_tau() -> None:
    above, below = 0.99, 0.96
    steps = np.array([[above, above], [above, below], [above, above]])  # [layers, steps]
    short = np.array([[above], [above], [below]])
    traces = [np.stack([steps, steps]), np.stack([short, short])]
    report = summarise(traces, 0.97, "flat", 8, 10)
    assert report.depth == (1, 2)
    assert report.first_depth == (3, 2)
    assert (report.steps, report.shallow) == (2, 1)
    assert report.shallow_mean == pytest.approx(above)
    assert np.array(report.similarity)[1].tolist() == pytest.approx([above, below])


@pytest.mark.parametrize(("value", "shallow"), [(0.99, 2), (0.5, 0)])
def test_a_report_without_deep_or_without_shallow_layers(value: float, shallow: int) -> None:
    report = summarise([np.full((2, 2, 1), value)], 0.97, "flat", 8, 10)
    assert report.shallow == shallow
    there, absent = (report.shallow_mean, report.deep_mean)[:: 1 if shallow else -1]
    assert there == pytest.approx(value)
    assert np.isnan(absent)


def test_refuses_what_it_is_not_defined_for() -> None:
    llm = open_model(str(goldens.model_dir("llada")))
    (request,) = requests(llm, 1)
    with pytest.raises(ConfigError, match="there is no request"):
        measure_prefix(llm, [])
    with pytest.raises(ConfigError, match="no shared prefix"):
        measure_prefix(llm, [Request("0", request.prompt_token_ids, request.params, 0)])
    with pytest.raises(ConfigError, match="cfg_scale=1: one canvas"):
        measure_prefix(llm, [Request("0", request.prompt_token_ids, SamplingParams(max_tokens=8, cfg_scale=1.0), 4)])
    with pytest.raises(ConfigError, match="is a uniform one"):
        measure_prefix(open_model(str(uniform.model_dir("unif"))), [request])
