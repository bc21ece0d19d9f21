"""`min_tokens` on every kind of model: no end token stands before that place, and the canvas is as long."""

from dataclasses import replace
from typing import Any

import pytest

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.plan.canvas import OPEN, Hole, Template
from remask.policies import Dense
from remask.request.sampling_params import SamplingParams
from remask.sampling.defaults import fit
from tests.engine import kinds
from tests.engine.support import (
    EOS,
    FAMILIES,
    Work,
    make_engine,
    poisoned_engine,
    run,
)
from tests.engine.test_infill import asked_with, policy_of, run_one
from tests.sampling_fields import flat_params

WANTED = 100.0
"""A bias that makes a token the most probable one wherever it may stand."""


def end_wanted(**sampling: Any) -> dict[str, Any]:
    return {"max_tokens": 12, "min_tokens": 7, "logit_bias": {EOS: WANTED}, "seed": 3, **sampling}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"block_length": 4, "steps_per_block": 2},
        {"growing_canvas": True, "block_length": 5},
        {"ignore_eos": True},
        {"speculate": 3},
        {"cfg_scale": 0.5},
    ],
    ids=repr,
)
def test_masked_models_end_no_earlier(family: str, sampling: dict[str, Any]) -> None:
    params = flat_params(**end_wanted(**sampling))
    open_ended = replace(params, min_tokens=None)
    for cache in ("none", "block-dual") if "speculate" not in sampling else ("none",):
        asked = Request("0", [7, 8, 9], params, policy=policy_of(cache))
        free, least = (
            run(make_engine(family), [Work(each, each.policy)])["0"]
            for each in (replace(asked, params=open_ended), asked)
        )
        assert free.token_ids[0] == EOS
        assert EOS not in least.token_ids[:7]
        assert least.token_ids[7] == EOS
        assert len(least.token_ids) == (12 if params.ignore_eos else 8)


@pytest.mark.parametrize("model", [*kinds.BLOCK_CAUSAL[:2], *kinds.UNIFORM[:2]])
def test_and_so_do_the_other_kinds(model: str) -> None:
    params = SamplingParams(max_tokens=12, min_tokens=7, logit_bias={kinds.EOS: WANTED}, seed=3, block_length=6)
    open_ended = ended(model, replace(params, min_tokens=None))
    least = ended(model, params)
    assert open_ended == (kinds.EOS,)
    assert kinds.EOS not in least[:7]
    assert least[7] == kinds.EOS


def test_many_tokens_may_be_ends() -> None:
    """Those that stop by the request's wish, also such as the model does not have, which stop nothing."""
    params = SamplingParams(max_tokens=12, min_tokens=11, stop_token_ids=[*range(30), 2**20], seed=3)
    assert min(ended("sdar", params)[:11]) >= 30


def ended(model: str, params: SamplingParams) -> tuple[int, ...]:
    """The response of a block-causal or uniform model."""
    engine = poisoned_engine(kinds.checkpoint(model).model, page_size=12)
    result = run(engine, [Work(Request("0", [7, 8, 9], params), Dense())])["0"]
    assert result.error is None
    return tuple(result.token_ids)


def test_places_of_a_hole_count_from_the_beginning_of_the_response() -> None:
    template = Template((7, 7, OPEN, OPEN, OPEN, OPEN, 8), (Hole(2, 6),), (EOS,))
    asked = asked_with(template, logit_bias={EOS: WANTED}, min_tokens=4)
    assert run_one(asked).token_ids[4:] == (EOS, EOS, 8)
    assert EOS not in run_one(asked).token_ids[:4]


def test_the_canvas_is_as_long() -> None:
    with pytest.raises(ConfigError, match="min_tokens=9 is more than max_tokens=8, the places of the response; raise"):
        SamplingParams(max_tokens=8, min_tokens=9)
    defaults = {"max_tokens": 32, "block_length": 16}
    assert fit(defaults, {"min_tokens": 33}, 1000).max_tokens == 48
    assert fit(defaults, {"min_tokens": 33}, 40).max_tokens == 40, "as much as there is room for"
    assert fit(defaults, {"min_tokens": 8}, 1000).max_tokens == 32
    assert fit({**defaults, "min_tokens": 20}, {"max_tokens": 8}, 1000).min_tokens == 8
    with pytest.raises(ConfigError, match="min_tokens=33 is more than max_tokens="):
        fit(defaults, {"min_tokens": 33}, 20)
