"""The word-level tokenizer of the bundled uniform model; special tokens have the ids of the published GIDD models."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from remask.tasks.timetable import MINUTES, Timetable

BOS: Final = "<|begin_of_text|>"
EOS: Final = "<|end_of_text|>"
PAD: Final = "<|padding|>"
MASK: Final = "<|mask|>"
UNKNOWN: Final = "<|unk|>"
SPECIAL: Final = (BOS, EOS, PAD, MASK, UNKNOWN)

_CONFIG: Final = {
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "mask_token": MASK,
    "unk_token": UNKNOWN,
    "clean_up_tokenization_spaces": False,
}


def vocabulary() -> dict[str, int]:
    """Returns the id of every word: special tokens, the words of a prompt, and the minutes in order."""
    words = [word for word in Timetable(1, 0).rule.split() if not word.isdigit()]
    return {word: number for number, word in enumerate([*SPECIAL, *words, *map(str, range(MINUTES))])}


def build_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """Builds the tokenizer, which puts BOS before a text; decoding joins words with single spaces."""
    words = vocabulary()
    core = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    # Splits punctuation from words, so that "from 44:" reads like the "from 44 :" of the training texts.
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, words[BOS])]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, model_max_length=model_max_length, **_CONFIG
    )


def save_tokenizer(folder: Path, model_max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, with keys that all versions of transformers read."""
    build_tokenizer(model_max_length).backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **_CONFIG, "model_max_length": model_max_length}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
