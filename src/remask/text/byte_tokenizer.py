"""A tokenizer of bytes, for models of random weights: their answers mean nothing, and are texts all the same."""

from collections.abc import Collection

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from remask.text.token_bytes import printable_bytes
from remask.text.tokenizer import Tokenizer

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(vocab: int, mask_id: int, stop_ids: Collection[int]) -> Tokenizer:
    """Texts are read as their bytes, ids below 256; any other id is written as its number, as in `<300>`.

    The mask and the stop tokens are special ones, in the place of a byte where their ids are below 256.
    """
    shown = {byte: char for char, byte in printable_bytes().items()}
    named = {token: f"<|stop {token}|>" for token in stop_ids} | {mask_id: "<|mask|>"}
    texts = {token: named.get(token) or shown.get(token) or f"<{token}>" for token in range(vocab)}
    backend = Backend(models.BPE(vocab={text: token for token, text in texts.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in named.values()])
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, clean_up_tokenization_spaces=False, chat_template=_TEMPLATE
    )
    return Tokenizer(made)
