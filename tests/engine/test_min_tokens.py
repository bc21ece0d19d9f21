"""Where responses end: `min_tokens` on every kind of model, and stops however tokens settle."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.plan.canvas import OPEN, Hole, Template
from remask.policies import Dense
from remask.request.sampling_params import SamplingParams
from remask.sampling.defaults import fit_defaults
from remask.text.incremental import MAX_PENDING, IncrementalDecoder, StopRule, StopScan
from tests.engine import kinds
from tests.engine.support import EOS, FAMILIES, Work, make_engine, poisoned_engine, policy_of, run
from tests.engine.test_infill import asked_with, run_one
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
        {"cfg_scale": 0.5},
    ],
    ids=repr,
)
def test_masked_models_end_no_earlier(family: str, sampling: dict[str, Any]) -> None:
    params = flat_params(**end_wanted(**sampling))
    open_ended = replace(params, min_tokens=None)
    for cache in ("none", "block-dual"):
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
    assert fit_defaults(defaults, {"min_tokens": 33}, 1000).max_tokens == 48
    assert fit_defaults(defaults, {"min_tokens": 33}, 40).max_tokens == 40, "as much as there is room for"
    assert fit_defaults(defaults, {"min_tokens": 8}, 1000).max_tokens == 32
    assert fit_defaults({**defaults, "min_tokens": 20}, {"max_tokens": 8}, 1000).min_tokens == 8
    with pytest.raises(ConfigError, match="min_tokens=33 is more than max_tokens="):
        fit_defaults(defaults, {"min_tokens": 33}, 20)


def decode(tokens: Sequence[int]) -> str:
    """One token a byte."""
    return bytes(tokens).decode("utf-8", "replace")


def first_stop(tokens: Sequence[int], rule: StopRule) -> int | None:
    """The shortest lead that ends with a stop token, or whose text holds a stop text."""
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[:end])
        if tokens[end - 1] in rule.token_ids or any(stop in text for stop in rule.texts):
            return end
    return None


BYTES = st.lists(st.one_of(st.sampled_from(list("aab é日".encode())), st.integers(0, 255)), max_size=60)


@given(
    BYTES,
    st.lists(st.text("ab é日", min_size=1, max_size=4), max_size=3),
    st.sets(st.integers(0, 255), max_size=1),
    st.data(),
)
def test_the_first_stop_is_found_however_tokens_settle(
    tokens: list[int], texts: list[str], ids: set[int], data: st.DataObject
) -> None:
    rule = StopRule(frozenset(ids), tuple(texts), decode if texts else None)
    scan, at = StopScan(rule), 0
    while at < len(tokens):
        step = data.draw(st.integers(1, 5))
        scan.push(tokens[at : at + step])
        at += step
    assert scan.end == first_stop(tokens, rule)


@given(BYTES, st.data())
def test_the_pieces_join_to_the_text(tokens: list[int], data: st.DataObject) -> None:
    decoder, at, said = IncrementalDecoder(decode), 0, ""
    while at < len(tokens):
        step = data.draw(st.integers(1, 9))
        said += decoder.push(tokens[at : at + step])
        at += step
    assert said + decoder.finish() == decode(tokens)


STREAMS = {
    "text": list(b"abc " * 500),
    "characters of three bytes": list("日本".encode() * 350),
    "no character at all": [0x80] * 2000,
    "characters that never end": [0xE2, 0x82] * 1000,
}


@pytest.mark.parametrize("name", STREAMS)
def test_each_token_is_decoded_a_few_times_only(name: str) -> None:
    seen = 0

    def counted(tokens: Sequence[int]) -> str:
        nonlocal seen
        seen += len(tokens)
        return decode(tokens)

    tokens = STREAMS[name]
    scan = StopScan(StopRule(frozenset(), ("zz" * 50,), counted))
    for token in tokens:
        scan.push([token])
    assert scan.end is None
    assert seen < 8 * MAX_PENDING * len(tokens)
    decoder = IncrementalDecoder(decode)
    assert "".join(decoder.push([token]) for token in tokens) + decoder.finish() == decode(tokens)


def test_tokens_without_text_are_forgotten_and_the_word_after_them_keeps_its_space() -> None:
    def words(tokens: Sequence[int]) -> str:
        """A space stands between words, as in tokenizers that strip the first one; 0 has no text."""
        return " ".join("w" * token for token in tokens if token)

    decoder = IncrementalDecoder(words)
    said = [decoder.push([token]) for token in [1, *[0] * 100, 2]]
    assert (said[0], "".join(said[1:-1]), said[-1]) == ("w", "", " ww")
