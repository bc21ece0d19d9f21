"""A choice as it grows from events that are made by hand."""

import pytest

from remask.answers.answer import ResponseCollector
from remask.checkpoint.source import resolve_model
from remask.checkpoint.tokenizer import load_tokenizer
from remask.engine.request import Request
from remask.request.result import Draft, Event, Result, Transfer, Usage
from remask.request.sampling_params import SamplingParams

TOKENIZER = load_tokenizer(resolve_model("bundled-transit"))
assert TOKENIZER is not None
A, B, C, D = TOKENIZER.encode("abbey acorn alder arch")
PROMPT = [A, B]


def answer(*, rewrites: bool = False, scored: bool = True, **sampling: object) -> ResponseCollector:
    params = SamplingParams.from_mapping({"max_tokens": 4, **sampling})
    assert TOKENIZER is not None
    return ResponseCollector(
        0, Request("r", PROMPT, params), TOKENIZER, (), token_text=str, rewrites=rewrites, with_logprobs=scored
    )


def wrote(step: int, tokens: dict[int, int], settled: tuple[int, ...] = ()) -> Event:
    positions = tuple(len(PROMPT) + place for place in tokens)
    return Event("r", transfer=Transfer(step, positions, tuple(tokens.values())), settled=settled)


def ended(*tokens: int) -> Event:
    return Event("r", result=Result("r", tokens, "stop", Usage(2, len(tokens)), (), 0.1, 0.2))


def test_only_what_is_settled_without_a_gap_is_said() -> None:
    choice = answer()
    assert choice.apply([wrote(0, {2: C})]).text == ""
    assert choice.apply([wrote(1, {0: A}, (A,))]).text == "abbey"
    assert choice.apply([wrote(2, {1: B}, (B, C))]).text == " acorn alder"
    last = choice.apply([wrote(3, {3: D}, (D,)), ended(A, B, C, D)])
    assert last.text == " arch"
    assert last.result is not None


def test_tokens_of_uniform_models_may_change_until_they_settle() -> None:
    drafts = [Event("r", draft=Draft(step, (2, 3, 9), (B, B, B), (0.5, 0.0, 0.1))) for step in range(2)]
    choice = answer(rewrites=True, scored=False)
    first = choice.apply([drafts[0], wrote(0, {0: D, 1: C})])
    assert first.canvas is not None
    assert (first.text, [place["settled"] for place in first.canvas["canvas"]]) == ("", [None] * 4)
    second = choice.apply([drafts[1], wrote(1, {0: A}, (A, C))])
    assert second.canvas is not None
    assert second.text == "abbey alder"
    assert [place["settled"] for place in second.canvas["canvas"]] == [1, 0, None, None]
    assert [place["token_id"] for place in second.canvas["canvas"]] == [A, C, None, None]


def test_noise_that_is_kept_settles_with_its_block() -> None:
    choice = answer(rewrites=True, scored=False)
    draft = Draft(5, (2, 3, 4, 5), (B, B, C, D), (0.5, 0.1, 0.1, 0.1))
    last = choice.apply([Event("r", draft=draft, transfer=wrote(5, {0: A}).transfer, settled=(A, B))])
    assert last.canvas is not None
    assert [place["settled"] for place in last.canvas["canvas"]] == [5, 5, None, None]


def test_blocks_are_told_as_places_of_the_response() -> None:
    assert TOKENIZER is not None
    params = SamplingParams(max_tokens=6)
    grid = [range(4), range(4, 8), range(8, 12)]  # the prompt fills two places of the first, four are past the end
    choice = ResponseCollector(0, Request("r", PROMPT, params), TOKENIZER, (), token_text=str, blocks=grid)
    assert choice.blocks == [(0, 2), (2, 6)]


@pytest.mark.parametrize("scored", [True, False])
def test_a_stop_ends_it_before_tokens_that_settled_with_it_or_after(scored: bool) -> None:
    for stop, text in (({"stop_token_ids": [B]}, "abbey acorn"), ({"stop": ["acorn"]}, "abbey ")):
        delta = answer(scored=scored, **stop).apply([wrote(0, {0: A, 1: B, 2: C}, (A, B, C)), ended(A, B)])
        assert (delta.text, len(delta.scored_tokens)) == (text, 2 if scored else 0)
    choice = answer(scored=scored, stop_token_ids=[B])
    assert choice.apply([wrote(0, {0: A, 1: B}, (A, B))]).text == "abbey acorn"
    assert choice.apply([wrote(1, {2: C, 3: D}, (C, D)), ended(A, B)]).text == ""
