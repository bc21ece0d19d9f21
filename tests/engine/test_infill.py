"""Responses with fixed parts: where padding may stand, why they end, and which are refused.

That fixed parts never change is held by `test_infill_against_oracles` and `test_mixtures`.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.plan.canvas import OPEN, Hole, Template
from remask.policies import Dense, RequestFacts
from remask.readers.forced import ForcedTokens
from remask.request.result import Result
from remask.request.sampling_params import SamplingParams
from tests.engine import kinds
from tests.engine.support import EOS, VOCAB, Work, make_engine, poisoned_engine, policy_of, request, run


def hole_then(fixed: int, length: int = 6) -> Template:
    return Template((OPEN,) * length + (7,) * fixed, (Hole(0, length),), (EOS,))


def asked_with(template: Template, **more: Any) -> Request:
    return replace(request(max_tokens=len(template), **more), template=template)


def run_one(asked: Request, policy: str = "none") -> Result:
    return run(make_engine(), [Work(asked, policy_of(policy))])[asked.id]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"remasking": "entropy"}, {"top_k": 1, "cfg_scale": 1.0}]
)
@pytest.mark.parametrize("cache", ["none", "block-dual", "dkv-decode"])
def test_padding_stands_only_where_it_may(sampling: dict[str, Any], cache: str) -> None:
    """Where all tokens but one are padding, the first places of a hole hold that one."""
    padding = tuple(token for token in range(VOCAB) if token != 9)
    template = replace(hole_then(2), holes=(Hole(0, 6, 4),), padding=padding)
    result = run_one(asked_with(template, seed=1, **sampling), cache)
    assert result.token_ids[:4] == (9, 9, 9, 9)
    assert set(result.token_ids[4:6]) - {9}, "the others are free"
    assert result.token_ids[6:] == (7, 7)


def test_why_it_ended() -> None:
    """A hole that had room for more, and has none left, ran out of it; one of a fixed length is whole."""
    assert run_one(asked_with(replace(hole_then(2), padding=()))).finish_reason == "length"
    assert run_one(asked_with(replace(hole_then(2), holes=(Hole(0, 6, 6),), padding=()))).finish_reason == "stop"
    every = tuple(range(VOCAB))
    assert run_one(asked_with(replace(hole_then(2), padding=every))).finish_reason == "stop"
    stopped = asked_with(replace(hole_then(2), padding=()), stop_token_ids=every)
    result = run_one(stopped)
    assert (result.finish_reason, len(result.token_ids)) == ("stop", 8), "the fixed end stays"


def test_a_stop_in_the_hole_at_the_end_ends_the_response() -> None:
    tokens = (7, 7, OPEN, OPEN, OPEN, OPEN)
    every = tuple(token for token in range(VOCAB) if token != 7)
    result = run_one(asked_with(Template(tokens, (Hole(2, 6),)), stop_token_ids=(7, *every), block_length=3))
    assert (result.finish_reason, len(result.token_ids)) == ("stop", 3), "a stop token that was given ends nothing"
    assert result.usage.completion_tokens == 1


def test_forced_tokens_repeat_a_run() -> None:
    template = Template((7, OPEN, OPEN, OPEN, 7, OPEN, OPEN, 7), (Hole(1, 4), Hole(5, 7)))
    asked = asked_with(template, temperature=1.0, seed=3)
    first = run_one(asked)
    greedy = replace(asked, params=replace(asked.params, temperature=0.0))
    again = run_one(greedy.with_readers(ForcedTokens(first.trace)))
    assert (again.token_ids, again.trace) == (first.token_ids, first.trace)


@pytest.mark.parametrize(
    ("template", "more", "told"),
    [
        (Template((1, 2), ()), {}, "canvas has no hole"),
        (Template((1, OPEN, VOCAB), (Hole(1, 2),)), {}, "canvas holds the token id 64; token ids go from 0 to 63"),
        (hole_then(2), {"max_tokens": 4}, "max_tokens=4 is not the canvas' length of 8"),
        (hole_then(2, 60), {}, "max_model_len is 64"),
        (
            Template((OPEN, 1, 1, OPEN, 1, 1), (Hole(0, 1), Hole(3, 4))),
            {"block_length": 3, "steps": 1},
            "steps=1 is less than the 2 blocks of the canvas that hold positions to be filled; use 2 or more",
        ),
        (
            hole_then(2, 2),
            {"remasking": "order", "order": [[8, 9, 10, 11]]},
            "list 0 must hold each canvas position from 8 to 11 that is to be filled once",
        ),
    ],
)
def test_refused(template: Template, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_engine().check(replace(request(**({"max_tokens": len(template)} | more)), template=template))


def test_a_block_causal_model_cannot_look_ahead() -> None:
    engine = poisoned_engine(kinds.checkpoint("sdar, blocks of 3").model, page_size=3)
    with pytest.raises(
        ConfigError, match="place 4 of the response is fixed, and its block comes after a block with a hole"
    ):
        engine.check(Request("r", [1], SamplingParams(max_tokens=8), template=replace(hole_then(4, 4), padding=())))
    template = Template((OPEN, 1), (Hole(0, 1),))  # both in the prompt's block
    results = run(
        engine, [Work(Request("r", [1], SamplingParams(max_tokens=2), template=template), policy_of("exact"))]
    )
    assert results["r"].token_ids[1] == 1


@dataclass(frozen=True)
class Windowed(Dense):
    window: int = 1

    def check(self, facts: RequestFacts) -> None:
        if self.window > facts.response:
            raise ConfigError(f"window={self.window} exceeds the response's {facts.response} positions")


def test_policies_count_the_positions_that_are_filled() -> None:
    with pytest.raises(ConfigError, match="window=7 exceeds the response's 6 positions"):
        make_engine().check(replace(asked_with(hole_then(20)), policy=Windowed(7)))


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_every_block_is_begun_before_a_request_is_accepted(family: str) -> None:
    """Blocks of a canvas hold 4, 3, 2 and 4 masks, and the first one alone suits its steps."""
    holes = (Hole(0, 4), Hole(5, 10), Hole(12, 18))
    tokens = [OPEN if any(h.start <= place < h.stop for h in holes) else 3 for place in range(18)]
    params = SamplingParams(
        max_tokens=18, block_length=4, steps=17, threshold=0.5, remasking="confidence_threshold", seed=0
    )
    asked = Request("r", [1, 2], params, template=Template(tuple(tokens), holes))
    engine = make_engine(family)
    with pytest.raises(ConfigError, match="a block of 2 masks has 3 steps: leave steps out"):
        engine.check(asked)
    for suits in ({"steps": None}, {"steps": None, "steps_per_block": 1}):
        assert run(engine, [Work(replace(asked, params=replace(params, **suits)), Dense())])["r"].error is None
