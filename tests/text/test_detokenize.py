"""Text of growing runs of tokens: the pieces join to the whole, and no stop text gets out."""

import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from remask.checkpoint.source import resolve_model
from remask.checkpoint.tokenizer import load_tokenizer
from remask.plan.canvas import OPEN, Hole, Template
from remask.request.sampling_params import SamplingParams
from remask.text.detokenize import Detokenizer, ResponseText
from remask.text.tokenizer import Tokenizer


def bundled() -> Tokenizer:
    tokenizer = load_tokenizer(resolve_model("bundled-transit"))
    assert tokenizer is not None
    return tokenizer


def bytewise() -> Tokenizer:
    """One token a byte, as byte-level BPE without merges, and a special token: any character spans tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    fast: Any = PreTrainedTokenizerFast
    return Tokenizer(fast(tokenizer_object=backend))


WORDS, BYTES = bundled(), bytewise()


def pieces(
    tokenizer: Tokenizer,
    tokens: list[int],
    cuts: random.Random,
    stops: tuple[str, ...] = (),
    included: bool = False,
) -> list[str]:
    """What is said of `tokens`, pushed a few at a time."""
    text = Detokenizer(tokenizer, stops, included)
    said, at = [], 0
    while at < len(tokens):
        step = cuts.randint(1, 4)
        said.append(text.push(tokens[at : at + step]))
        at += step
    return [*said, text.finish()]


@given(st.lists(st.integers(0, 120), max_size=40), st.randoms(use_true_random=False))
def test_words_with_special_tokens_among_them(tokens: list[int], cuts: random.Random) -> None:
    assert "".join(pieces(WORDS, tokens, cuts)) == WORDS.decode(tokens)


@given(st.text(max_size=30), st.randoms(use_true_random=False))
def test_characters_that_span_tokens_are_said_whole(text: str, cuts: random.Random) -> None:
    tokens = BYTES.encode(text)
    said = pieces(BYTES, tokens, cuts)
    assert "".join(said) == BYTES.decode(tokens) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in said)


@given(st.lists(st.integers(0, 256), max_size=30), st.randoms(use_true_random=False))
def test_bytes_that_are_no_text_still_come_out(tokens: list[int], cuts: random.Random) -> None:
    assert "".join(pieces(BYTES, tokens, cuts)) == BYTES.decode(tokens)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the stop lies that reading `text` by characters meets first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end - max(map(len, complete)), end
    return None


STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(st.text("abc", max_size=24), STOPS, st.booleans(), st.randoms(use_true_random=False))
@example("cabca", ["abca", "bc"], False, random.Random(0))
def test_text_ends_at_the_stop_that_is_complete_first_however_tokens_come(
    text: str, stops: list[str], included: bool, cuts: random.Random
) -> None:
    tokens = BYTES.encode(text)
    span = first_stop(text, stops)
    expected = text if span is None else text[: span[1] if included else span[0]]
    assert "".join(pieces(BYTES, tokens, cuts, tuple(stops), included)) == expected
    detokenizer = Detokenizer(BYTES, stops, included)
    assert detokenizer.push(tokens) + detokenizer.finish() == expected, "at once"
    assert detokenizer.length == len(expected)
    assert detokenizer.stop == (None if span is None else text[span[0] : span[1]])


@given(st.text("abc", max_size=24), STOPS, st.randoms(use_true_random=False))
def test_text_that_is_out_begins_no_stop(text: str, stops: list[str], cuts: random.Random) -> None:
    detokenizer, out = Detokenizer(BYTES, stops), ""
    tokens, at = BYTES.encode(text), 0
    while at < len(tokens):
        step = cuts.randint(1, 4)
        out += detokenizer.push(tokens[at : at + step])
        at += step
        if detokenizer.stop is None:
            begun = max((n for stop in stops for n in range(len(stop)) if text[:at].endswith(stop[:n])), default=0)
            assert out == text[: min(at, len(text)) - begun], "what begins a stop is held, and no more"


@given(st.text("abc", min_size=1, max_size=24), st.integers(0, 24), STOPS, st.randoms(use_true_random=False))
def test_each_hole_of_a_response_ends_so(text: str, middle: int, stops: list[str], cuts: random.Random) -> None:
    tokens, middle = BYTES.encode(text), min(middle, len(text))
    holes = [Hole(start, stop) for start, stop in ((0, middle), (middle, len(text))) if start < stop]
    params = SamplingParams(max_tokens=len(text), block_length=len(text), stop=stops)
    response = ResponseText(BYTES, Template((OPEN,) * len(text), tuple(holes)), params)
    said, at = "", 0
    while at < len(tokens):
        step = cuts.randint(1, 4)
        said += response.push(tokens[at : at + step])
        at += step
    spans = [first_stop(text[hole.start : hole.stop], stops) for hole in holes]
    expected = [
        text[hole.start : hole.stop if span is None else hole.start + span[0]]
        for hole, span in zip(holes, spans, strict=True)
    ]
    assert response.holes == expected
    assert said + response.finish() == "".join(expected)
    assert response.length == len("".join(expected))


@given(st.text("abc", max_size=24), st.text("abc", min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_text_ends_with_the_stop_where_it_is_included(text: str, stop: str, cuts: random.Random) -> None:
    said = "".join(pieces(BYTES, BYTES.encode(text), cuts, (stop,), included=True))
    place = text.find(stop)
    assert said == (text if place < 0 else text[: place + len(stop)])


def test_what_may_become_a_stop_is_held_back_and_no_more() -> None:
    text = Detokenizer(BYTES, ["abcd"])
    assert text.push(BYTES.encode("xxab")) == "xx"
    assert text.push(BYTES.encode("c")) == ""
    assert text.push(BYTES.encode("abc")) == "abc"
    assert text.push(BYTES.encode("d more")) == ""
    assert text.stop
    assert text.push(BYTES.encode("even more")) == text.finish() == ""


@pytest.mark.parametrize(
    ("text", "stops", "left", "stop"),
    [
        ("abc", [], "abc", None),
        ("abc", ["c", "b"], "a", "b"),
        ("xabc", ["abc", "ab"], "x", "ab"),
        ("xabcd", ["abcd", "bc"], "xa", "bc"),
        ("xabc", ["bc", "abc"], "x", "abc"),
        ("", ["a"], "", None),
    ],
)
@pytest.mark.parametrize("step", [1, 4, 9])
def test_overlapping_stops(text: str, stops: list[str], left: str, stop: str | None, step: int) -> None:
    detokenizer = Detokenizer(BYTES, stops)
    tokens = BYTES.encode(text)
    said = [detokenizer.push(tokens[at : at + step]) for at in range(0, len(tokens), step)]
    assert "".join(said) + detokenizer.finish() == left
    assert detokenizer.stop == stop
