"""What the tokenizers of the masked models share: special tokens, the chat template, words, and their files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS: Final = "<|startoftext|>"
EOS: Final = "<|endoftext|>"
MASK: Final = "<|mdm_mask|>"
HEADER_START: Final = "<|start_header_id|>"
HEADER_END: Final = "<|end_header_id|>"
TURN_END: Final = "<|eot_id|>"
SPECIAL: Final = (EOS, BOS, MASK, HEADER_START, HEADER_END, TURN_END)

ROLES: Final = ("system", "user", "assistant")
MARKS: Final = (":", ";", ",", ".", "?", "\n\n")

PIECE: Final = r" ?[A-Za-z]+| ?[0-9]+|\n\n| ?[^\sA-Za-z0-9]|\s"
"""What is looked up whole: a word, a number or a mark, with the space before it; other white space by the character."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_SETTINGS: Final = {
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": EOS,
    "mask_token": MASK,
    "additional_special_tokens": [HEADER_START, HEADER_END, TURN_END],
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1024,
    "chat_template": CHAT_TEMPLATE,
}


def wrap(core: Tokenizer, **further: str) -> PreTrainedTokenizerFast:
    """Returns `core` with the special tokens and the chat template; `further` are more settings."""
    return PreTrainedTokenizerFast(tokenizer_object=core, **_SETTINGS, **further)  # type: ignore[no-untyped-call]


def by_word(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of these words, with byte fallback.

    A word is one token, with and without the space before it, and everything else becomes the bytes of its UTF-8. So
    every text can be read, and decoding gives back the text exactly. Ids go to special tokens, bytes, roles and marks,
    then words, bare and after a space.
    """
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*SPECIAL, *bytes_, *ROLES, *MARKS, *words, *(f" {word}" for word in words)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return wrap(core)


def save(tokenizer: PreTrainedTokenizerFast, folder: Path, **further: str) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, the chat template inside the latter.

    The configuration is written by hand: its keys are read by version 4 of transformers as well as by version 5, while
    version 5 writes a class name of its own.
    """
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_SETTINGS, **further}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
