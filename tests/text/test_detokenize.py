"""Text of growing runs of tokens: the pieces join to the whole, and no stop text gets out."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from remask.checkpoint.source import resolve_model
from remask.checkpoint.tokenizer import load_tokenizer
from remask.text.detokenize import Detokenizer
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


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.randoms(use_true_random=False),
)
def test_text_ends_before_the_first_stop(text: str, stops: list[str], cuts: random.Random) -> None:
    said = pieces(BYTES, BYTES.encode(text), cuts, tuple(stops))
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    assert "".join(said) == text[: min(places, default=None)]


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
    ("text", "stops", "left"),
    [("abc", [], "abc"), ("abc", ["c", "b"], "ab"), ("xabc", ["abc", "ab"], "xab"), ("", ["a"], "")],
)
def test_the_first_stop_and_of_those_that_begin_together_the_shortest(text: str, stops: list[str], left: str) -> None:
    detokenizer = Detokenizer(BYTES, stops, include_stop=True)
    assert detokenizer.push(BYTES.encode(text)) + detokenizer.finish() == left
