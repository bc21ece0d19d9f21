"""Stop tokens and stop texts: found where a search of every lead finds them, and each token is looked at once."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.text.incremental import MAX_PENDING, IncrementalDecoder, StopRule


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
    scan, at = rule.scan(), 0
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
    scan = StopRule(frozenset(), ("zz" * 50,), counted).scan()
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
