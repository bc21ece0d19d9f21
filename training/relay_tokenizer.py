"""The tokenizer of the graded model, in the file layout that `transformers.AutoTokenizer` loads."""

from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerFast

from remask.tasks import relay
from training.tokenizer_files import by_word, save

WORDS: Final = ("In", "route", "from", "Where", "to", relay.OPENING.removesuffix(":"))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer: a token for every word of the task, and bytes for everything else."""
    return by_word([*WORDS, *relay.SEASONS, *relay.GOODS, *relay.TOWNS])


def save_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    save(build_tokenizer(), folder)
