"""The tokenizer of the tariff model, in the file layout that `transformers.AutoTokenizer` loads.

Word-level with byte fallback: a word of the task is one token, with and without the space before it, and everything
else becomes the bytes of its UTF-8. So every text can be read, and decoding gives back the text exactly.
"""

from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from remask.tasks import tariff
from training.tokenizer_files import SPECIAL, save, wrap

ROLES: Final = ("system", "user", "assistant")
MARKS: Final = (":", ";", ",", ".", "?", "\n\n")
WORDS: Final = ("Plan", "plan", "who", "Who", "pays", "ordered", tariff.ORDERS.removesuffix(":"))

PIECE: Final = r" ?[A-Za-z]+| ?[0-9]+|\n\n| ?[^\sA-Za-z0-9]|\s"
"""What is looked up whole: a word, a number or a mark, with the space before it; other white space by the character."""


def vocabulary() -> dict[str, int]:
    """Returns the id of every token: special ones, bytes, then the words of the task, bare and after a space."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    prices = [str(price) for price in range(1, tariff.PRICES + 1)]
    words = [*WORDS, *prices, *tariff.PLANS, *tariff.TITLES, *tariff.NAMES]
    tokens = [*SPECIAL, *bytes_, *ROLES, *MARKS, *words, *(f" {word}" for word in words)]
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer."""
    core = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], byte_fallback=True, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return wrap(core)


def save_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    save(build_tokenizer(), folder)
