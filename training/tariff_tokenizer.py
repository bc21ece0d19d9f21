"""The tokenizer of the tariff model, in the file layout that `transformers.AutoTokenizer` loads."""

from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerFast

from remask.tasks import tariff
from training.tokenizer_files import by_word, save

WORDS: Final = ("Plan", "plan", "who", "Who", "pays", "ordered", tariff.ORDERS.removesuffix(":"))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer: a token for every word of the task, and bytes for everything else."""
    prices = [str(price) for price in range(1, tariff.PRICES + 1)]
    return by_word([*WORDS, *prices, *tariff.PLANS, *tariff.TITLES, *tariff.NAMES])


def save_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    save(build_tokenizer(), folder)
