"""What the tokenizers of the masked models share: special tokens, the chat template, and the files that hold them."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

BOS: Final = "<|startoftext|>"
EOS: Final = "<|endoftext|>"
MASK: Final = "<|mdm_mask|>"
HEADER_START: Final = "<|start_header_id|>"
HEADER_END: Final = "<|end_header_id|>"
TURN_END: Final = "<|eot_id|>"
SPECIAL: Final = (EOS, BOS, MASK, HEADER_START, HEADER_END, TURN_END)

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


def save(tokenizer: PreTrainedTokenizerFast, folder: Path, **further: str) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, the chat template inside the latter.

    The configuration is written by hand: its keys are read by version 4 of transformers as well as by version 5, while
    version 5 writes a class name of its own.
    """
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_SETTINGS, **further}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
