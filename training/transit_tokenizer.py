"""The word-level tokenizer of the transit model, in the file layout that `transformers.AutoTokenizer` loads."""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from remask.tasks import transit
from training.tokenizer_files import BOS, EOS, HEADER_END, HEADER_START, MASK, TURN_END, save, wrap

UNKNOWN: Final = "<|unk|>"
SPECIAL: Final = (EOS, BOS, MASK, UNKNOWN, HEADER_START, HEADER_END, TURN_END)

RECITE: Final = "recite the table"
"""The user message of a recitation, the exercise that teaches to look rows up."""


def vocabulary() -> dict[str, int]:
    """Returns the id of every word: special tokens first, then all words that the task can produce."""
    words = ["system", "user", "assistant", *transit.RULES.split(), ">", ";", transit.SEPARATOR]
    words += transit.TransitQuestion("", 1).text.split()
    words += [str(hops) for hops in range(1, transit.MAX_HOPS + 1)] + RECITE.split()
    words += transit.STOPS
    return {word: number for number, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer; without a decoder, decoding joins words with single spaces."""
    core = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    # Splits punctuation from words, so that "where am i?" reads like the "where am i ?" of the training texts.
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrap(core, unk_token=UNKNOWN)


def save_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    save(build_tokenizer(), folder, unk_token=UNKNOWN)
