"""The word-level tokenizer of the bundled model, in the file layout that `transformers.AutoTokenizer` loads."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from remask.tasks import transit

BOS: Final = "<|startoftext|>"
EOS: Final = "<|endoftext|>"
MASK: Final = "<|mdm_mask|>"
UNKNOWN: Final = "<|unk|>"
HEADER_START: Final = "<|start_header_id|>"
HEADER_END: Final = "<|end_header_id|>"
TURN_END: Final = "<|eot_id|>"
SPECIAL: Final = (EOS, BOS, MASK, UNKNOWN, HEADER_START, HEADER_END, TURN_END)

RECITE: Final = "recite the table"
"""The user message of a recitation, the exercise that teaches to look rows up."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        unk_token=UNKNOWN,
        additional_special_tokens=[HEADER_START, HEADER_END, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def save_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, the chat template inside the latter.

    The configuration is written by hand: the keys below are read by version 4 of transformers as well as by version 5,
    while version 5 writes a class name of its own.
    """
    core = build_tokenizer().backend_tokenizer
    core.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [HEADER_START, HEADER_END, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
