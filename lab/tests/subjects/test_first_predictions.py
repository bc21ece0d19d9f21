"""First predictions by depth, against the engine's own first steps and against the dense oracle."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.canvas import OPEN, Hole, Template
from remask.request.sampling_params import SamplingParams
from remask_lab.instruments.depths import first_predictions
from remask_lab.instruments.watch import Passes
from remask_lab.records.interval import mean_interval
from remask_lab.subjects.first_predictions import (
    FirstPredictions,
    Shift,
    deepest,
    measure_predictions,
    reading,
    usual_depths,
)
from remask_lab.subjects.prefix_similarity import measure_prefix
from tests import goldens
from tests.depth.models import open_model
from tests.goldens import uniform
from tests.oracles import bicache, dense
from tests.oracles.canvas import Canvas

PREFIX, MASKS = 20, 8
PARAMS = SamplingParams(max_tokens=MASKS, steps=4, ignore_eos=True)
NAN = (math.nan, math.nan)


def requests(llm: LLM) -> list[Request]:
    limit = llm.model.config.vocab
    prompts = [[token % limit for token in goldens.prompts()[name]] for name in ("s0a", "s0b", "s1a")]
    return [Request(str(i), prompt, PARAMS, PREFIX) for i, prompt in enumerate(prompts)]


def first_step(llm: LLM, request: Request, cache: str, settings: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of the rows that the engine's first step predicts."""
    policy = llm.session.policy(cache, settings)
    seen = Passes(llm, [request]).run(request, policy, lambda each: llm.model.head(each.hidden).log_softmax(-1))
    return seen[0]


@pytest.mark.parametrize("name", ["llada", "dream"])
@pytest.mark.parametrize("prefix", [PREFIX, 1000])
def test_they_are_those_of_the_engines_first_step(name: str, prefix: int) -> None:
    """At depth 0 `none`, at all layers `reuse`, and `bicache` between; also where all of the prompt is shared."""
    llm = open_model(str(goldens.model_dir(name)))
    layers = llm.model.config.layers
    for asked in requests(llm)[:2]:
        request = replace(asked, prefix_length=min(prefix, len(asked.prompt_token_ids)))
        passes = Passes(llm, [request])
        canvas, count = passes.canvas(request), passes.prefix(request)
        found = dict(first_predictions(llm.model, canvas, count, range(layers + 1)))
        torch.testing.assert_close(found[0], first_step(llm, request, "none", {}), atol=1e-4, rtol=0)
        torch.testing.assert_close(found[layers], first_step(llm, request, "reuse", {}), atol=1e-4, rtol=0)
        for depth in range(1, layers):
            wanted = first_step(llm, request, "bicache", {"depth": depth})
            torch.testing.assert_close(found[depth], wanted, atol=1e-4, rtol=0)
        assert (found[0] - found[layers]).abs().max() > 1e-3


def test_the_canvas_is_that_with_which_the_engine_begins() -> None:
    """With the fixed tokens of its template, and of one block where it grows."""
    llm = open_model(str(goldens.model_dir("llada")))
    plain = requests(llm)[0]
    template = Template((OPEN,) * 5 + (7, 8, 9), (Hole(0, 5),))
    infilled, layers = replace(plain, template=template), llm.model.config.layers
    passes = Passes(llm, [infilled])
    ((_, found),) = first_predictions(llm.model, passes.canvas(infilled), PREFIX, (layers,))
    assert len(found) == 5
    torch.testing.assert_close(found, first_step(llm, infilled, "reuse", {}), atol=1e-4, rtol=0)
    growing = replace(plain, params=replace(PARAMS, block_length=4, blocks={"growing_canvas": True}))
    report = measure_predictions(llm, [plain, growing], [0, 0], [layers])
    assert report.canvas_tokens == len(plain.prompt_token_ids) + (MASKS + 4) / 2


def test_numbers_are_those_of_the_dense_oracle() -> None:
    folder = goldens.model_dir("llada")
    llm, oracle = open_model(str(folder)), dense.load(folder)
    work, clusters = requests(llm), [0, 0, 1]
    report = measure_predictions(llm, work, clusters, range(llm.model.config.layers + 1))
    nats, same = [], []
    for request in work:
        canvas = Canvas(list(request.prompt_token_ids), MASKS, oracle.mask_id)
        leased, nothing = bicache.lease(oracle, canvas, PREFIX), oracle.empty_kv(canvas.length)
        logs = []
        for shift in report.shifts:
            out = bicache.refresh_pass(oracle, canvas, leased, shift.depth, ~leased.rows, nothing, "stored")
            logs.append(oracle.predictions(out.logits)[-MASKS:].log_softmax(-1))
        nats.append(
            [torch.nn.functional.kl_div(log, logs[0], reduction="none", log_target=True).sum(-1) for log in logs]
        )
        same.append([float((log.argmax(-1) == logs[0].argmax(-1)).double().mean()) for log in logs])
    for at, shift in enumerate(report.shifts):
        greatest = [float(request[at].max()) for request in nats]
        assert shift.nats == pytest.approx(np.mean(greatest), abs=1e-3)
        assert shift.mean_nats == pytest.approx(np.mean([float(request[at].mean()) for request in nats]), abs=1e-3)
        assert shift.same == pytest.approx(np.mean([request[at] for request in same]))
        low, high = mean_interval(greatest, clusters)
        assert shift.nats_interval == pytest.approx((max(0, low), high), abs=1e-2)
        assert 0 <= shift.same_interval[0] <= shift.same_interval[1] <= 1
    zero = report.shifts[0]
    assert (zero.nats, zero.mean_nats, zero.same, zero.nats_interval) == (0, 0, 1, (0, 0))
    assert report.shifts[-1].nats > 1e-4
    assert (report.requests, report.prefixes, report.prefix_tokens) == (3, 2, PREFIX)


def test_many_requests_are_as_each_alone() -> None:
    llm = open_model(str(goldens.model_dir("llada")))
    work = requests(llm)
    together = measure_predictions(llm, work, [0, 1, 2], [2, 1, 1], tau=0.9)
    alone = [measure_predictions(llm, [request], [0], [1, 2], tau=0.9) for request in work]
    assert [shift.depth for shift in together.shifts] == [1, 2]
    assert together.rule == tuple(depth for report in alone for depth in report.rule)
    for at, shift in enumerate(together.shifts):
        assert shift.nats == pytest.approx(np.mean([report.shifts[at].nats for report in alone]))
        assert math.isnan(alone[0].shifts[at].nats_interval[0])


def test_the_rule_is_that_of_the_profiler() -> None:
    """The leading layers above tau in the first step, one fewer as the layer above the depth is looked at too."""
    llm = open_model(str(goldens.model_dir("llada")))
    (request, *_), layers = requests(llm), llm.model.config.layers
    similarity = np.array(measure_prefix(llm, [request]).similarity)[:, 0]
    for tau in (*(similarity[1:] - 1e-4), 0.9999):
        above = int((np.minimum.accumulate(similarity) > tau).sum())
        wanted = above if above == layers else above - 1
        assert measure_predictions(llm, [request], [0], [1], tau=float(tau)).rule == (wanted,)


def shift(depth: int, nats: float, high: float = math.nan) -> Shift:
    return Shift(depth, nats, (0.0 if high == high else math.nan, high), nats / 2, NAN, 0.9, NAN)


def report(*shifts: Shift) -> FirstPredictions:
    return FirstPredictions(
        4, 2, 90, 100, 30, shifts, 0.1, deepest({each.depth: each.nats for each in shifts}), 0.97, (19, 21)
    )


@pytest.mark.parametrize(
    ("nats", "depth"),
    [
        ({1: 0.0, 2: 0.1, 3: 0.2}, 2),
        ({1: 0.2, 2: 0.0, 3: 0.0}, 0),
        ({1: 0.0, 2: 0.3, 3: 0.0}, 1),
        ({10: 0.0, 2: 0.0}, 10),
        ({10: 0.0, 2: 0.2}, 0),
    ],
)
def test_all_depths_up_to_the_deepest_stay_within_the_bound(nats: dict[int, float], depth: int) -> None:
    assert deepest(nats, 0.1) == depth


def test_readings() -> None:
    told = reading(report(shift(4, 0.01), shift(6, 0.02, 0.05), shift(8, 0.65)), "--model m")
    assert "Up to depth 6 of 30 first predictions move by at most 0.1 nats where they move most: 0.020" in told
    assert "at depth 8, the next one measured, it is 0.650." in told
    assert "gives depth 19 at tau 0.97 on the same requests (mean of their own: 20.0)" in told
    assert "interval reaches" not in told
    assert "--cache-config '{\"depth\": 6}'" in told
    assert told.endswith("remask bench --model m --caches none,reuse --depths 6,8")
    assert "The interval reaches beyond the bound" in reading(report(shift(1, 0.05, 0.2)))
    assert reading(report(shift(30, 0.0))).endswith("--depths 30")
    assert reading(report(shift(0, 0.0), shift(1, 0.5))).endswith("--cache none.")
    lower = reading(report(shift(4, 0.5)))
    assert "No depth that was measured stays within 0.1 nats: at depth 4 first predictions move by 0.500" in lower
    assert lower.endswith("Lower depths were not measured: give --depths 1,2,3.")


def test_a_reading_of_weights_that_round_activations() -> None:
    told = reading(replace(report(shift(1, 0.5)), quantization="int8"))
    assert told.endswith("measure with --quantization none, and use the depth with any.")
    told = reading(replace(report(shift(1, 0.05), shift(2, 0.5)), quantization="fp8"))
    assert "With weights in fp8 activations are rounded" in told
    assert told.endswith("--depths 1,2")
    assert "are rounded" not in reading(replace(report(shift(1, 0.05)), quantization="int4"))


def test_usual_depths_end_with_all_layers() -> None:
    assert usual_depths(1) == [1]
    assert usual_depths(4) == [1, 2, 3, 4]
    assert usual_depths(30) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 30]


def test_refuses_what_it_is_not_defined_for() -> None:
    llm = open_model(str(goldens.model_dir("llada")))
    request = requests(llm)[0]
    with pytest.raises(ConfigError, match="there is no request"):
        measure_predictions(llm, [], [], [1])
    with pytest.raises(ConfigError, match="no shared prefix"):
        measure_predictions(llm, [replace(request, prefix_length=0)], [0], [1])
    with pytest.raises(ConfigError, match=r"from 1 to the model's \d+, got \[0\]"):
        measure_predictions(llm, [request], [0], [0])
    with pytest.raises(ConfigError, match="exceeds the model's"):
        measure_predictions(llm, [request], [0], [99])
    with pytest.raises(ConfigError, match="tau must lie between"):
        measure_predictions(llm, [request], [0], [1], tau=2)
    with pytest.raises(ConfigError, match="is a uniform one"):
        measure_predictions(open_model(str(uniform.model_dir("unif"))), [request], [0], [1])
