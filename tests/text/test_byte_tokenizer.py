"""The tokenizer that a server of random weights has: every id has a text, and texts are their bytes."""

import pytest

from remask.checkpoint.tokenizer import byte_tokenizer
from remask.families import PRESETS, preset

TEXTS = ["plain", "Grüße, 世界 🙂\n\t", "<300> and <|mask|", ""]


@pytest.mark.parametrize("vocab", [256, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_as_its_bytes(vocab: int, text: str) -> None:
    tokenizer = byte_tokenizer(vocab, 255, (250,))
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_id_has_a_text_and_special_ones_are_left_out() -> None:
    tokenizer = byte_tokenizer(1000, 999, (998, 7))
    assert tokenizer.special_ids == {7, 998, 999}
    assert tokenizer.decode([300, 999, 65, 7, 997]) == "<300>A<997>"
    assert tokenizer.encode("a<|mask|>") == [97, 999]
    texts = tokenizer.token_bytes(1000)
    assert [token for token, text in enumerate(texts) if text is None] == [7, 998, 999]
    assert len(set(texts)) == 998


def test_it_renders_conversations() -> None:
    tokenizer = byte_tokenizer(256, 255, (250,))
    rendered = tokenizer.render_chat([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    assert rendered == "system: a\nuser: b\nassistant: "


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny")])
def test_it_serves_every_family(name: str) -> None:
    config = preset(name)
    tokenizer = byte_tokenizer(config.vocab, config.mask_id, config.stop_ids)
    assert tokenizer.special_ids == {*config.stop_ids, *({config.mask_id} - {-1})}  # some have no mask
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
