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
from remask_lab.instruments.depths import first_predictions, measure_predictions
from remask_lab.instruments.watch import Passes
from remask_lab.records.interval import mean_interval
from tests import goldens
from tests.depth.models import open_model
from tests.goldens import uniform
from tests.oracles import bicache, dense
from tests.oracles.canvas import Canvas

PREFIX, MASKS = 20, 8
PARAMS = SamplingParams(max_tokens=MASKS, steps=4, ignore_eos=True)


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
        found = dict(first_predictions(passes.audits, canvas, count, range(layers + 1)))
        torch.testing.assert_close(found[0], first_step(llm, request, "none", {}), atol=1e-4, rtol=0)
        torch.testing.assert_close(found[layers], first_step(llm, request, "reuse", {}), atol=1e-4, rtol=0)
        for depth in range(1, layers):
            wanted = first_step(llm, request, "bicache", {"depth": depth})
            torch.testing.assert_close(found[depth], wanted, atol=1e-4, rtol=0)
        assert (found[0] - found[layers]).abs().max() > 1e-3


def test_the_canvas_is_that_with_which_the_engine_begins() -> None:
    """With the fixed tokens of its template."""
    llm = open_model(str(goldens.model_dir("llada")))
    plain = requests(llm)[0]
    template = Template((OPEN,) * 5 + (7, 8, 9), (Hole(0, 5),))
    infilled, layers = replace(plain, template=template), llm.model.config.layers
    passes = Passes(llm, [infilled])
    ((_, found),) = first_predictions(passes.audits, passes.canvas(infilled), PREFIX, (layers,))
    assert len(found) == 5
    torch.testing.assert_close(found, first_step(llm, infilled, "reuse", {}), atol=1e-4, rtol=0)


def test_numbers_are_those_of_the_dense_oracle() -> None:
    folder = goldens.model_dir("llada")
    llm, oracle = open_model(str(folder)), dense.load(folder)
    work, clusters = requests(llm), [0, 0, 1]
    shifts = measure_predictions(llm, work, clusters, range(llm.model.config.layers + 1))
    nats, same = [], []
    for request in work:
        canvas = Canvas(list(request.prompt_token_ids), MASKS, oracle.mask_id)
        leased, nothing = bicache.lease(oracle, canvas, PREFIX), oracle.empty_kv(canvas.length)
        logs = []
        for shift in shifts:
            out = bicache.refresh_pass(oracle, canvas, leased, shift.depth, ~leased.rows, nothing, "stored")
            logs.append(oracle.predictions(out.logits)[-MASKS:].log_softmax(-1))
        nats.append(
            [torch.nn.functional.kl_div(log, logs[0], reduction="none", log_target=True).sum(-1) for log in logs]
        )
        same.append([float((log.argmax(-1) == logs[0].argmax(-1)).double().mean()) for log in logs])
    for at, shift in enumerate(shifts):
        greatest = [float(request[at].max()) for request in nats]
        assert shift.nats == pytest.approx(np.mean(greatest), abs=1e-3)
        assert shift.mean_nats == pytest.approx(np.mean([float(request[at].mean()) for request in nats]), abs=1e-3)
        assert shift.same == pytest.approx(np.mean([request[at] for request in same]))
        low, high = mean_interval(greatest, clusters)
        assert shift.nats_interval == pytest.approx((max(0, low), high), abs=1e-2)
        assert 0 <= shift.same_interval[0] <= shift.same_interval[1] <= 1
    zero = shifts[0]
    assert (zero.nats, zero.mean_nats, zero.same, zero.nats_interval) == (0, 0, 1, (0, 0))
    assert shifts[-1].nats > 1e-4


def test_many_requests_are_as_each_alone() -> None:
    llm = open_model(str(goldens.model_dir("llada")))
    work = requests(llm)
    together = measure_predictions(llm, work, [0, 1, 2], [2, 1, 1])
    alone = [measure_predictions(llm, [request], [0], [1, 2]) for request in work]
    assert [shift.depth for shift in together] == [1, 2]
    for at, shift in enumerate(together):
        assert shift.nats == pytest.approx(np.mean([shifts[at].nats for shifts in alone]))
        assert math.isnan(alone[0][at].nats_interval[0])


def test_refuses_what_it_is_not_defined_for() -> None:
    llm = open_model(str(goldens.model_dir("llada")))
    request = requests(llm)[0]
    with pytest.raises(ConfigError, match="there is no request"):
        measure_predictions(llm, [], [], [1])
    with pytest.raises(ConfigError, match="no shared prefix"):
        measure_predictions(llm, [replace(request, prefix_length=0)], [0], [1])
    with pytest.raises(ConfigError, match="exceeds the model's"):
        measure_predictions(llm, [request], [0], [99])
    with pytest.raises(ConfigError, match="is a uniform one"):
        measure_predictions(open_model(str(uniform.model_dir("unif"))), [request], [0], [1])
